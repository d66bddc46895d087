// The case browser. Everything of a case is put in as text, never as markup.
"use strict";
const cases = JSON.parse(document.getElementById("cases").textContent);
const MARKS = { right: "✓", alike: "≈", missed: "✗", added: "+" };

function make(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// As many hues as there are items; neighbors lie far apart (the golden angle).
const color = (place) => `hsl(${Math.round(place * 137.5) % 360} 70% ${place % 2 ? 80 : 86}%)`;
const values = (of) => [...new Set(cases.flatMap(of))].sort();

// A filter: what it is called, its values, whether a case passes one of them; and its <select>.
const attributes = [...new Set(cases.flatMap((one) => Object.keys(one.groups)))];
const sure = [["< 0.5", 0, 0.5], ["0.5 – 0.8", 0.5, 0.8], ["≥ 0.8", 0.8, 1.01]];
const FILTERS = [
  ...Object.keys(cases[0]?.classes ?? {}).map((field) => [
    field + " · 正确或预测", values((one) => one.classes[field]), (one, value) => one.classes[field].includes(value)]),
  ["wrong field · 错误字段", values((one) => one.wrong), (one, value) => one.wrong.includes(value)],
  ...attributes.map((name) => [
    name, values((one) => one.groups[name] ?? []), (one, value) => one.groups[name] === value]),
  ["confidence · 置信度",
    cases.some((one) => one.confidence !== null) ? sure.map(([told]) => told) : [],
    (one, value) => {
      const [, low, high] = sure.find(([told]) => told === value);
      return one.confidence !== null && one.confidence >= low && one.confidence < high;
    }],
  ["handling · 处理", values((one) => one.handled), (one, value) => one.handled.includes(value)],
].filter(([, all]) => all.length > 0).map(([told, all, test]) => ({ told, all, test, select: make("select") }));

let found = cases;
let current = null;
let buttons = [];

function addFilters() {
  FILTERS.forEach(({ told, all, select }, number) => {
    const filter = make("div");
    select.id = "filter-" + number;
    select.append(make("option", "–", { value: "" }), ...all.map((value) => make("option", value, { value })));
    select.addEventListener("change", showList);
    filter.append(make("label", told, { for: select.id }), select);
    document.getElementById("filters").append(filter);
  });
}

function showList() {
  found = cases.filter((one) => FILTERS.every(({ select, test }) => select.value === "" || test(one, select.value)));
  buttons = found.map((one, place) => {
    const told = one.wrong.length ? "✗ " + one.wrong.join(", ") : "✓";
    const button = make("button", one.id + " " + told, { type: "button" });
    if (one.wrong.length) button.classList.add("wrong");
    button.addEventListener("click", () => showCase(place));
    return button;
  });
  document.getElementById("list").replaceChildren(...buttons);
  document.getElementById("count").textContent = `${found.length} / ${cases.length}`;
  if (found.includes(current)) fillCase(found.indexOf(current));
  else document.getElementById("case").replaceChildren(make("p", "choose a case · 请选择案例", { class: "note" }));
}

function showFields(fields) {
  const table = make("table"), head = make("tr");
  head.append(...["", "gold · 正确", "predicted · 预测"].map((text) => make("th", text, { scope: "col" })));
  table.append(head);
  for (const field of fields) {
    const line = make("tr");
    // Where the whole is right, what differs only says it in other words.
    const other = field.right ? "alike" : null;
    line.append(
      make("th", field.name, { scope: "row" }),
      showValues(field.gold, (value) => (field.told.includes(value) ? "right" : other ?? "missed")),
      showValues(field.told, (value) => (field.gold.includes(value) ? "right" : other ?? "added")));
    table.append(line);
  }
  return table;
}

function showValues(all, kind) {
  const cell = make("td");
  for (const value of all) cell.append(make("span", `${MARKS[kind(value)]} ${value}`, { class: kind(value) }), " ");
  if (all.length === 0) cell.append("–");
  return cell;
}

function showFacts(text) {
  const facts = make("div", "", { id: "facts" });
  for (const [sentence, named] of text) {
    const part = make("span", sentence);
    part.dataset.named = named.join(" ");
    if (named.length === 1) part.style.background = color(named[0]);
    if (named.length > 1) {
      const stops = named.map((place, i) => `${color(place)} ${(100 * i) / named.length}% ${(100 * (i + 1)) / named.length}%`);
      part.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    }
    facts.append(part);
    if (named.length) facts.append(make("sup", named.map((place) => place + 1).join(" ")));
  }
  return facts;
}

function showItem([name, fields], place, all) {
  const section = make("section");
  if (name) {
    const head = make("h4");
    if (all.length > 1) head.append(make("sup", place + 1), " ");
    const shown = make("span", name, { class: "name" });
    shown.style.background = color(place);
    head.append(shown);
    section.append(head);
  }
  section.append(showFields(fields));
  return section;
}

function steps(place) {
  const line = make("p", "", { class: "steps" });
  const step = (text, able, act) => {
    const button = make("button", text, { type: "button" });
    button.disabled = !able;
    button.addEventListener("click", act);
    line.append(button, " ");
  };
  step("← previous · 上一个", place > 0, () => showCase(place - 1));
  step("next · 下一个 →", place + 1 < found.length, () => showCase(place + 1));
  step("list · 列表", true, () => buttons[place].focus());
  return line;
}

function showCase(place) {
  fillCase(place);
  const shown = document.getElementById("case");
  shown.focus({ preventScroll: true });
  shown.scrollIntoView({ block: "start" });
}

function fillCase(place) {
  const one = current = found[place];
  for (const button of buttons) button.removeAttribute("aria-current");
  buttons[place].setAttribute("aria-current", "true");
  buttons[place].scrollIntoView({ block: "nearest" });
  const raw = make("details");
  raw.append(make("summary", "raw reply · 原始回答"), ...one.reply.map((text) => make("pre", text)));
  const told = Object.entries(one.groups).map(([name, value]) => `${name}: ${value}`);
  if (one.confidence !== null) told.push("confidence · 置信度: " + one.confidence.toFixed(2));
  document.getElementById("case").replaceChildren(
    make("h3", one.id), steps(place), make("p", [...told, ...one.notes].join(" · "), { class: "note" }),
    ...one.items.map(showItem), showFacts(one.text), raw);
}

addFilters();
showList();
