import { html } from "./ui.js";
export function Overview() { return html`<h1>Overview</h1>`; }
