import { html } from "./ui.js";
export function Api() { return html`<h1>Api</h1>`; }
