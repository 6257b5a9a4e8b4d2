"""Puts the plugin's probes to the Python sources of a vLLM that is not installed.

Nothing is imported: names, methods, arguments, fields and assignments are read from the syntax tree. It answers the
same questions as `vllm_plugin.sources.Installed`, so a probe does not know which of the two it looks at. Classes from
outside the sources (a base class of msgspec, say) count as having no members.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm_plugin.sources import assigned_attributes

__all__ = ["Unpacked"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Unpacked:
    """`vllm_plugin.sources.Sources` over a folder that holds the package's `.py` files.

    Args:
        root: the folder with the package in it, as `site-packages` is for an installed one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._module = cache(self._read)

    def has(self, path: str) -> bool:
        module, _, name = path.partition(":")
        tree = self._module(module)  # Raises where there is none.
        return not name or name in _defined(tree) or bool(self._imported(module, name))

    def parameters(self, path: str, method: str) -> set[str]:
        arguments = self._method(path, method)[1].args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return {argument.arg for argument in every}

    def assigned(self, path: str) -> set[str]:
        return assigned_attributes(self._method(path, "__init__")[1])

    def members(self, path: str) -> set[str]:
        return {name for _, node in self._family(path) for name in _defined(node)}

    def method_text(self, path: str, method: str) -> str:
        module, node = self._method(path, method)
        return ast.get_source_segment(self.module_text(module), node) or ""

    def module_text(self, module: str) -> str:
        return self._file(module).read_text()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _file(self, module: str) -> Path:
        path = self.root.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        raise ModuleNotFoundError(module)

    def _read(self, module: str) -> ast.Module:
        return ast.parse(self.module_text(module))

    def _imported(self, module: str, name: str) -> str | None:
        """Where `module` takes `name` from, as "module:name"; None when it does not import it."""
        package = module if self._file(module).name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(self._module(module)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                        return f"{'.'.join(part for part in (base, node.module) if part)}:{alias.name}"
        return None

    def _class(self, path: str) -> tuple[str, ast.ClassDef]:
        module, _, name = path.partition(":")
        for node in self._module(module).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
        origin = self._imported(module, name)
        if origin is None:
            raise LookupError(path)
        return self._class(origin)

    def _family(self, path: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class and those of its bases that the sources hold, nearest first."""
        module, node = self._class(path)
        yield module, node
        for base in node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(named, ast.Name):
                try:
                    yield from self._family(f"{module}:{named.id}")
                except (LookupError, ModuleNotFoundError):
                    continue

    def _method(self, path: str, method: str) -> tuple[str, _Function]:
        for module, node in self._family(path):
            for statement in node.body:
                if isinstance(statement, _Function) and statement.name == method:
                    return module, statement
        raise LookupError(f"{path}.{method}")


def _defined(node: ast.Module | ast.ClassDef) -> set[str]:
    """Names that the statements of a module or class define: classes, functions, and assigned or annotated names."""
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, _Function | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return names
