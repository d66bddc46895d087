// The case browser. Text of a case is inserted as text, never as markup.
"use strict";
const cases = JSON.parse(document.getElementById("cases").textContent);
const MARKS = { right: "✓", alike: "≈", missed: "✗", added: "+" };

function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// One hue per item; neighbors differ most with steps of the golden angle.
const color = (index) => `hsl(${Math.round(index * 137.5) % 360} 70% ${index % 2 ? 80 : 86}%)`;
const values = (valuesOf) => [...new Set(cases.flatMap(valuesOf))].sort();

// A filter: its label, its values, whether a case has a value; and its <select>.
const attributes = [...new Set(cases.flatMap(({ groups }) => Object.keys(groups)))];
const confidences = [["< 0.5", 0, 0.5], ["0.5 – 0.8", 0.5, 0.8], ["≥ 0.8", 0.8, 1.01]];
const FILTERS = [
  ...Object.keys(cases[0]?.classes ?? {}).map((field) => [
    field + " · 正确或预测", values(({ classes }) => classes[field]), ({ classes }, value) => classes[field].includes(value)]),
  ["wrong field · 错误字段", values(({ wrong }) => wrong), ({ wrong }, value) => wrong.includes(value)],
  ...attributes.map((name) => [
    name, values(({ groups }) => groups[name] ?? []), ({ groups }, value) => groups[name] === value]),
  ["confidence · 置信度",
    cases.some(({ confidence }) => confidence !== null) ? confidences.map(([label]) => label) : [],
    ({ confidence }, value) => {
      const [, low, high] = confidences.find(([label]) => label === value);
      return confidence !== null && confidence >= low && confidence < high;
    }],
  ["handling · 处理", values(({ handled }) => handled), ({ handled }, value) => handled.includes(value)],
].filter(([, options]) => options.length > 0)
  .map(([label, options, test]) => ({ label, options, test, select: make("select") }));

const search = make("input", "", { type: "search", id: "search" });
let shown = cases; // the cases that pass all filters
let current = null;
let buttons = [];

const wholeText = ({ text }) => text.map(([sentence]) => sentence).join("");

function addFilters() {
  const words = make("div");
  search.addEventListener("input", showList);
  words.append(make("label", "search the facts · 搜索案情", { for: "search" }), search);
  document.getElementById("filters").append(words);
  FILTERS.forEach(({ label, options, select }, number) => {
    const filter = make("div");
    select.id = "filter-" + number;
    select.append(make("option", "–", { value: "" }), ...options.map((value) => make("option", value, { value })));
    select.addEventListener("change", showList);
    filter.append(make("label", label, { for: select.id }), select);
    document.getElementById("filters").append(filter);
  });
}

function showList() {
  shown = cases.filter((example) => wholeText(example).includes(search.value) && FILTERS.every(({ select, test }) => select.value === "" || test(example, select.value)));
  buttons = shown.map((example, index) => {
    const mark = example.wrong.length ? "✗ " + example.wrong.join(", ") : "✓";
    const button = make("button", example.id + " " + mark, { type: "button" });
    button.append(make("small", wholeText(example).slice(0, 60)));
    if (example.wrong.length) button.classList.add("wrong");
    button.addEventListener("click", () => showCase(index));
    return button;
  });
  document.getElementById("list").replaceChildren(...buttons);
  document.getElementById("count").textContent = `${shown.length} / ${cases.length}`;
  if (shown.includes(current)) fillCase(shown.indexOf(current));
  else document.getElementById("case").replaceChildren(make("p", "choose a case · 请选择案例", { class: "note" }));
}

function fieldTable(fields) {
  const table = make("table"), header = make("tr");
  header.append(...["", "gold · 正确", "predicted · 预测"].map((text) => make("th", text, { scope: "col" })));
  table.append(header);
  for (const field of fields) {
    const row = make("tr");
    // The field is right although this value differs: it has the same meaning in other words.
    const differing = field.correct ? "alike" : null;
    row.append(
      make("th", field.name, { scope: "row" }),
      valueCell(field.gold, (value) => (field.predicted.includes(value) ? "right" : differing ?? "missed")),
      valueCell(field.predicted, (value) => (field.gold.includes(value) ? "right" : differing ?? "added")));
    table.append(row);
  }
  return table;
}

function valueCell(texts, kind) {
  const cell = make("td");
  for (const value of texts) cell.append(make("span", `${MARKS[kind(value)]} ${value}`, { class: kind(value) }), " ");
  if (texts.length === 0) cell.append("–");
  return cell;
}

function factsBlock(text) {
  const facts = make("div", "", { id: "facts" });
  for (const [sentence, named] of text) {
    const part = make("span", sentence);
    part.dataset.named = named.join(" ");
    if (named.length === 1) part.style.background = color(named[0]);
    if (named.length > 1) {
      const stops = named.map((index, i) => `${color(index)} ${(100 * i) / named.length}% ${(100 * (i + 1)) / named.length}%`);
      part.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    }
    facts.append(part);
    if (named.length) facts.append(make("sup", named.map((index) => index + 1).join(" ")));
  }
  return facts;
}

function itemSection([name, fields], index, items) {
  const section = make("section");
  if (name) {
    const heading = make("h4"), label = make("span", name, { class: "name" });
    if (items.length > 1) heading.append(make("sup", index + 1), " ");
    label.style.background = color(index);
    heading.append(label);
    section.append(heading);
  }
  section.append(fieldTable(fields));
  return section;
}

function stepButtons(index) {
  const line = make("p", "", { class: "steps" });
  const add = (text, enabled, action) => {
    const button = make("button", text, { type: "button" });
    button.disabled = !enabled;
    button.addEventListener("click", action);
    line.append(button, " ");
  };
  add("← previous · 上一个", index > 0, () => showCase(index - 1));
  add("next · 下一个 →", index + 1 < shown.length, () => showCase(index + 1));
  add("list · 列表", true, () => buttons[index].focus());
  return line;
}

function showCase(index) {
  fillCase(index);
  buttons[index].scrollIntoView({ block: "nearest" });
  const article = document.getElementById("case");
  article.focus({ preventScroll: true });
  article.scrollIntoView({ block: "start" });
}

function fillCase(index) {
  const example = current = shown[index];
  for (const button of buttons) button.removeAttribute("aria-current");
  buttons[index].setAttribute("aria-current", "true");
  const raw = make("details");
  raw.append(make("summary", "raw reply · 原始回答"), ...example.reply.map((text) => make("pre", text)));
  const notes = Object.entries(example.groups).map(([name, value]) => `${name}: ${value}`);
  if (example.confidence !== null) notes.push("confidence · 置信度: " + example.confidence.toFixed(2));
  document.getElementById("case").replaceChildren(
    make("h3", example.id), stepButtons(index), make("p", [...notes, ...example.notes].join(" · "), { class: "note" }),
    ...example.items.map(itemSection), factsBlock(example.text), raw);
}

addFilters();
showList();
if (cases.length && matchMedia("(min-width: 45em)").matches) fillCase(0); // on a phone the list comes first
