// The case browser. Everything of a case is put in as text, never as markup.
"use strict";
const cases = JSON.parse(document.getElementById("cases").textContent);
const COLOURS = ["#ffe08a", "#b6e3b6", "#bcd9f5", "#f6c1c7", "#dccbf2", "#ffd0a8", "#b9e6e0", "#e2e2a8"];

function make(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const colour = (place) => COLOURS[place % COLOURS.length];
const values = (of) => [...new Set(cases.flatMap(of))].sort();

// A filter: what it is called, its values, and whether a case passes one of them.
const attributes = [...new Set(cases.flatMap((one) => Object.keys(one.groups)))];
const sure = [["< 0.5", 0, 0.5], ["0.5 – 0.8", 0.5, 0.8], ["≥ 0.8", 0.8, 1.01]];
const FILTERS = [
  ["class", "class · 类别", values((one) => one.classes), (one, value) => one.classes.includes(value)],
  ["wrong", "wrong field · 错误字段", values((one) => one.wrong), (one, value) => one.wrong.includes(value)],
  ...attributes.map((name) => [
    name, name, values((one) => one.groups[name] ?? []), (one, value) => one.groups[name] === value]),
  ["confidence", "confidence · 置信度",
    cases.some((one) => one.confidence !== null) ? sure.map(([told]) => told) : [],
    (one, value) => {
      const [, low, high] = sure.find(([told]) => told === value);
      return one.confidence !== null && one.confidence >= low && one.confidence < high;
    }],
].filter(([, , all]) => all.length > 0);

function addFilters() {
  for (const [name, told, all] of FILTERS) {
    const label = make("label", told);
    const select = make("select", "", { id: "filter-" + name });
    select.append(make("option", "–", { value: "" }), ...all.map((value) => make("option", value, { value })));
    select.addEventListener("change", showList);
    label.append(select);
    document.getElementById("filters").append(label);
  }
}

function passes(one) {
  return FILTERS.every(([name, , , test]) => {
    const wanted = document.getElementById("filter-" + name).value;
    return wanted === "" || test(one, wanted);
  });
}

function showList() {
  const found = cases.filter(passes);
  const list = document.getElementById("list");
  list.replaceChildren(...found.map((one) => {
    const button = make("button", one.id + (one.wrong.length ? " · " + one.wrong.join(", ") : " ✓"), { type: "button" });
    if (one.wrong.length) button.classList.add("wrong");
    button.addEventListener("click", () => showCase(one, button));
    return button;
  }));
  document.getElementById("count").textContent = `${found.length} / ${cases.length}`;
}

function showField(field) {
  const line = make("p");
  line.append(make("b", field.name + ": "));
  for (const value of field.gold) {
    const right = field.told.includes(value);
    line.append(make("span", value, { class: right ? "right" : "missed" }), " ");
  }
  for (const value of field.told.filter((one) => !field.gold.includes(one))) {
    line.append("→ ", make("span", value, { class: "added" }), " ");
  }
  return line;
}

function showCase(one, button) {
  for (const other of document.querySelectorAll("#list [aria-current]")) other.removeAttribute("aria-current");
  button.setAttribute("aria-current", "true");
  const facts = make("div", "", { id: "facts" });
  for (const [sentence, named] of one.text) {
    const part = make("span", sentence);
    part.dataset.named = named.join(" ");
    if (named.length === 1) part.style.background = colour(named[0]);
    if (named.length > 1) {
      const stops = named.map((place, i) => `${colour(place)} ${(100 * i) / named.length}% ${(100 * (i + 1)) / named.length}%`);
      part.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    }
    facts.append(part);
  }
  const items = one.items.map(([name, fields], place) => {
    const section = make("section");
    if (name) {
      const head = make("h4");
      const shown = make("span", name, { class: "name" });
      shown.style.background = colour(place);
      head.append(shown);
      section.append(head);
    }
    section.append(...fields.map(showField));
    return section;
  });
  const raw = make("details");
  raw.append(make("summary", "raw reply · 原始回答"), ...one.reply.map((text) => make("pre", text)));
  const told = Object.entries(one.groups).map(([name, value]) => `${name}: ${value}`);
  if (one.confidence !== null) told.push("confidence · 置信度: " + one.confidence.toFixed(2));
  const shown = document.getElementById("case");
  shown.replaceChildren(make("h3", one.id), make("p", told.join(" · "), { class: "note" }), ...items, facts, raw);
  shown.focus({ preventScroll: true });
}

addFilters();
showList();
