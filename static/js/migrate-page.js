import { enhanceMigrateForm } from "./migrate-form.js";

enhanceMigrateForm(document.querySelector("#migrate-form"));
