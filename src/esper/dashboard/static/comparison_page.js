"use strict";
// The live page of one comparison, read again while it is played.

// Returns what ends the page.
function comparisonPage(main, name) {
  const part = comparisonPart("comparison");
  const status = el("span");
  const top = el("div");
  const settings = folded("All settings", el("div"));
  main.append(
    el("h1", { tabindex: -1 }, name, " ", status),
    top,
    part.node,
    section("config", "Configuration", settings));
  let shape = "";
  return every(2, async () => {
    const data = await ask(`api/comparisons/${address(name)}`);
    const now = JSON.stringify([data.version, data.header.status, data.header.done]);
    if (now === shape) return;
    shape = now;
    status.replaceChildren(badge(data.header.status));
    top.replaceChildren(el("p", { class: "quiet" }, subtitle(data.header)), comparisonFacts(data));
    part.draw(data);
    settings.lastChild.replaceChildren(configTable(data.config));
    main.dataset.version = data.version;
  });
}
