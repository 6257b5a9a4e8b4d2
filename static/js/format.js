// Numbers for people. The same rules as instances/templatetags/formats.py, so that a value looks alike before and after an update.

const NO_VALUE = "–";

export function count(value) {
  return value == null ? NO_VALUE : Number(value).toLocaleString("en-US");
}

/** Bytes to a decimal unit with three significant digits. */
export function size(bytes) {
  if (bytes == null) return NO_VALUE;
  let value = Number(bytes);
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return unit === "B" ? `${value.toFixed(0)} B` : `${value < 100 ? value.toFixed(1) : value.toFixed(0)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export function milliseconds(value) {
  if (value == null) return NO_VALUE;
  const ms = Number(value);
  if (ms >= 10000) return seconds(ms / 1000);
  return ms < 10 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(0)} ms`;
}

export function seconds(value) {
  if (value == null) return NO_VALUE;
  const total = Math.max(0, Number(value));
  if (total < 60) return `${total.toFixed(total < 1 ? 2 : 1)} s`;
  const whole = Math.floor(total);
  const pad = (part) => String(part).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${pad(Math.floor((whole % 3600) / 60))} min`;
}

export function times(value) {
  return value == null ? NO_VALUE : `${Number(value).toFixed(1)}×`;
}

/** Nearest-rank percentile, as the server computes it; null for an empty list. */
export function percentile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}

export function ago(date, now = new Date()) {
  const past = Math.round((now - date) / 1000);
  if (past < 0) return "just now";
  if (past < 60) return `${past} s ago`;
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  return `${Math.floor(past / 86400)} d ago`;
}
