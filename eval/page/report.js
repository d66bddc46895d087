// The case browser, in the reader's language. Text of a case is inserted as text, never as markup.
"use strict";
const { cases, labels, features, classFields, hasGold, answeredBy } = JSON.parse(document.getElementById("data").textContent);
const address = new URLSearchParams(location.search); // the language, and what is chosen
const inChinese = (address.get("lang") ?? navigator.language).startsWith("zh");
document.documentElement.lang = inChinese ? "zh" : "en";
const say = (english, chinese) => (inChinese ? chinese : english);
// What happened to a reply -> its name; the English note says more.
const HANDLED = { shortened: "缩短原文", cut: "超长截断", "content filter": "内容过滤", unreadable: "无法解析", repaired: "修复", "not asked": "模型未回答" };
const labelOf = (name) => (Object.hasOwn(labels, name) ? say(...labels[name]) : name);

function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// One hue per item; neighbors differ most with steps of the golden angle.
const hue = (index) => `hsl(${(210 + index * 137.5) % 360} 62% 48%)`;
const distinct = (valuesOf) => [...new Set(cases.flatMap(valuesOf))].sort();

// A filter: its label, its values, whether a case has a value, how a value is shown; and its <select>.
const attributes = [...new Set(cases.flatMap(({ groups }) => Object.keys(groups)))];
const confidences = [["< 0.5", 0, 0.5], ["0.5 – 0.8", 0.5, 0.8], ["≥ 0.8", 0.8, 1.01]];
const asItIs = (value) => value;
// How model and classifier compare in a case; that both are right counts only if nothing else does.
const agreements = ({ opinions }) => {
  const found = opinions.flat().map(([, agreement]) => agreement);
  const others = found.filter((agreement) => agreement !== "agree, right");
  return others.length > 0 ? others : found;
};
const fieldsOf = ({ items }) => items.flatMap(([, fields]) => fields);
const wrongFields = (example) => (hasGold ? fieldsOf(example) : []).filter(({ correct }) => !correct).map(({ name }) => name);
const classesOf = (example, field) => fieldsOf(example).filter(({ name }) => name === field).flatMap(({ gold, predicted }) => [...gold, ...predicted]);
const FILTERS = [
  ...classFields.map((field) => [
    labelOf(field) + (hasGold ? say(`, ${labelOf("gold")} or predicted`, `（${labelOf("gold")}或预测）`) : ""),
    distinct((example) => classesOf(example, field)), (example, value) => classesOf(example, field).includes(value), asItIs]),
  [say("wrong field", "答错的字段"), distinct(wrongFields), (example, value) => wrongFields(example).includes(value), labelOf],
  ...attributes.map((name) => [
    labelOf(name), distinct(({ groups }) => groups[name] ?? []), ({ groups }, value) => groups[name] === value, asItIs]),
  [say("model and classifier", "模型与分类器"), distinct(agreements), (example, value) => agreements(example).includes(value), labelOf],
  [say("mean confidence", "平均置信度"),
    cases.some(({ confidence }) => confidence !== null) ? confidences.map(([range]) => range) : [],
    ({ confidence }, value) => {
      const [, low, high] = confidences.find(([range]) => range === value);
      return confidence !== null && confidence >= low && confidence < high;
    }, asItIs],
  [say("handling", "处理"), distinct(({ handled }) => Object.keys(handled)), ({ handled }, value) => Object.hasOwn(handled, value), (value) => say(value, HANDLED[value])],
].filter(([, options]) => options.length > 0)
  .map(([label, options, test, show]) => ({ label, options, test, show, select: make("select") }));

const form = document.getElementById("filters");
const search = make("input", "", { type: "search", id: "search", name: "search" });
let shown = cases; // the cases that pass all filters
let current = null;
let buttons = [];

const wholeText = ({ text }) => text.map(([piece]) => piece).join("");

function addFilters() {
  addFilter(say("search the facts", "搜索案情"), search);
  FILTERS.forEach(({ label, options, show, select }, number) => {
    select.id = select.name = "filter-" + number;
    select.append(make("option", "–", { value: "" }), ...options.map((value) => make("option", show(value), { value })));
    addFilter(label, select);
  });
  form.append(make("button", say("show all", "清除筛选"), { type: "reset" }));
  const count = form.children.length;
  form.style.setProperty("--columns", Math.ceil(count / Math.ceil(count / 6))); // rows of equal length
  form.addEventListener("input", showList);
  form.addEventListener("reset", () => setTimeout(showList)); // once the fields are empty
}

function addFilter(label, field) {
  const filter = make("div");
  filter.append(make("label", label, { for: field.id }), field);
  form.append(filter);
  field.value = address.get(field.id) ?? "";
}

// The other language opens with what is chosen here.
function keepChoices({ currentTarget }) {
  currentTarget.search = new URLSearchParams([...new FormData(form), ["case", cases.indexOf(current)], ["lang", currentTarget.hreflang]]);
}

function showList() {
  shown = cases.filter((example) => wholeText(example).includes(search.value) && FILTERS.every(({ select, test }) => select.value === "" || test(example, select.value)));
  buttons = shown.map((example, index) => {
    const wrong = [...new Set(wrongFields(example))];
    const mark = wrong.length ? "✗ " + wrong.map(labelOf).join(say(", ", "、")) : hasGold ? "✓" : "";
    const button = make("button", example.id + " " + mark, { type: "button", tabindex: index ? "-1" : "0" });
    button.append(make("small", wholeText(example).slice(0, 60)));
    if (wrong.length) button.classList.add("wrong");
    button.addEventListener("click", () => showCase(index));
    button.addEventListener("keydown", ({ key }) => buttons[index + { ArrowDown: 1, ArrowUp: -1 }[key]]?.focus());
    return button;
  });
  document.getElementById("list").replaceChildren(...buttons);
  document.getElementById("count").textContent = `${shown.length} / ${cases.length}`;
  if (shown.length === 1) fillCase(0);
  else if (shown.includes(current)) fillCase(shown.indexOf(current));
  else document.getElementById("case").replaceChildren(make("p", say("choose a case", "请选择案件"), { class: "note" }));
}

// Who answered each field, as the run recorded. The answer that was not handed in has its own column.
const ANSWERERS = { model: say("model", "模型"), classifier: say("text classifier", "文本分类器") };
const isMixed = new Set(answeredBy).size > 1;
const answerHeadings = isMixed ? [say("handed in", "提交的答案"), say("not handed in", "未采用的答案")]
  : answeredBy[0] === "classifier" ? [ANSWERERS.classifier, ANSWERERS.model] : [ANSWERERS.model, ANSWERERS.classifier];

function fieldTable(fields, opinions, whys) {
  const table = make("table"), header = make("tr");
  const answers = opinions ? answerHeadings : [say("predicted", "预测")];
  header.append(...[say("field", "字段"), ...(hasGold ? [labelOf("gold")] : []), ...answers].map((text) => make("th", text, { scope: "col" })));
  table.append(header);
  fields.forEach((field, number) => {
    const row = make("tr");
    const head = make("th", labelOf(field.name), { scope: "row", title: field.name });
    if (opinions && isMixed) head.append(make("small", ANSWERERS[answeredBy[number]]));
    const confidence = whys?.[number]?.[1] ?? null;
    if (confidence !== null) head.append(make("small", say("confidence ", "置信度 ") + confidence.toFixed(2)));
    row.append(head);
    if (hasGold) row.append(valueCell(field.gold.map((value) => make("span", value))));
    row.append(answerCell(field));
    if (opinions) row.append(opinionCell(opinions[number]));
    table.append(row);
  });
  return table;
}

const answerCell = (field) => valueCell([...predictedValues(field), ...(classFields.includes(field.name) ? missedValues(field) : [])]);

function opinionCell([field, agreement]) {
  const cell = answerCell(field);
  if (agreement.startsWith("differ")) cell.append(make("span", say("≠ differs", "≠ 不一致"), { class: "differs" }));
  return cell;
}

function valueCell(spans) {
  const cell = make("td");
  for (const span of spans) cell.append(span, " ");
  if (spans.length === 0) cell.append("–");
  return cell;
}

function predictedValues({ gold, predicted, correct }) {
  if (!hasGold) return predicted.map((value) => make("span", value));
  if (predicted.length === 0 && !correct) return [make("span", say("✗ nothing", "✗ 无"), { class: "added" })];
  return predicted.map((value) => {
    if (gold.includes(value)) return make("span", "✓ " + value, { class: "right" });
    // The field is right although this value differs: it has the same meaning in other words.
    return correct ? make("span", "≈ " + value, { class: "right" }) : make("span", "✗ " + value, { class: "added" });
  });
}

// The gold labels that the prediction lacks. Of one label that is wrong the gold column says enough.
function missedValues({ gold, predicted }) {
  if (!hasGold || gold.length <= 1) return [];
  return gold.filter((value) => !predicted.includes(value))
    .map((value) => make("span", say("✗ missed: ", "✗ 遗漏：") + value, { class: "missed" }));
}

// Why a field was answered so: who answered, the answer that was not handed in, and the text classifier's reasons.
const signed = (number) => (number < 0 ? "−" : "+") + Math.abs(number).toFixed(2);
const percent = (share) => (100 * share).toFixed(share > 0.0005 && share < 0.9995 ? 1 : 0) + "%";
const featureOf = (name) => (Object.hasOwn(features, name) ? say(...features[name]) : name);
const BRACKETS = [ // what stands for names and places in the list
  [/^this person$/, "本人"], [/^every case$/, "每个案件都有"], [/^name$/, "人名"], [/^no\. (\d+) in the list$/, "名单第 $1 人"], [/^7th or later in the list$/, "名单第 7 人以后"],
  [/^(\d+) in the list$/, "名单共 $1 人"], [/^7 or more in the list$/, "名单至少 7 人"], [/^last in the list$/, "名单末位"], [/^not last in the list$/, "不在名单末位"],
];
const inWords = (text) => !inChinese ? text : text.replace(/\[([^\]]*)\]/g, (_, inside) => {
  const [pattern, chinese] = BRACKETS.find(([one]) => one.test(inside)) ?? [inside, inside];
  return "〔" + inside.replace(pattern, chinese) + "〕";
});

function whyFold(fields, whys, opinions, text) {
  const fold = make("details", "", { class: "why" });
  fold.append(make("summary", say("why", "理由")));
  fields.forEach((field, number) => fold.append(...whyField(field, whys[number], opinions?.[number], text)));
  fold.append(make("p", say(
    "These are the text classifier's reasons, not the model's. Confidence is the probability that exactly this answer is right. Each label of a set has its own probability. Numbers are log-odds: how much a word or sentence adds to the linear model's score for the label. Then trees weigh this score, the scores of the whole case, and counts from the text. A word is one or two characters, or words of another script.",
    "以上是文本分类器的依据，不是模型自己的理由。置信度是答案完全正确的概率；同一字段的每个标签各有自己的概率。数字是对数几率，即词句使线性模型对该标签的得分增加或减少多少。决策树再综合该得分、全案的得分和从文中数出的情节。这里的“词”是一个字或相邻的两个字。"), { class: "note" }));
  return fold;
}

function whyField(field, [by, confidence, likeliest, reasons], opinion, text) {
  const values = field.predicted.join(say(", ", "、")) || "–";
  const shown = [make("h5", labelOf(field.name) + say(": ", "：") + values), make("p", whoAnswered(by, confidence) + otherAnswer(by, opinion))];
  const table = make("div", "", { class: "likeliest" });
  for (const [label, share] of likeliest) {
    const isAnswered = reasons.some(([answered]) => answered === label);
    table.append(make("meter", "", { value: share, "aria-hidden": "true" }), make("span", percent(share)), make(isAnswered ? "b" : "span", label));
  }
  if (likeliest.length) shown.push(make("p", say("likeliest by the text classifier:", "文本分类器认为最可能："), { class: "note" }), table);
  for (const reason of reasons) shown.push(...reasonLines(reason, text));
  return shown;
}

function whoAnswered(by, confidence) {
  const known = { ...ANSWERERS, vote: say("vote of several runs", "多次训练投票") };
  const who = by === "" ? say("nobody knows who answered", "无法得知由谁回答")
    : Object.hasOwn(known, by) ? say("answered by the ", "回答者：") + known[by]
    : say("not in the model's reply; filled in with: ", "模型未答，补为：") + labelOf(by);
  return who + (confidence === null ? "" : say(", confidence ", "，置信度 ") + confidence.toFixed(2));
}

function otherAnswer(by, opinion) {
  if (!Object.hasOwn(ANSWERERS, by)) return "";
  if (!opinion) return by === "classifier" ? say("; the model was not asked", "；未询问模型") : "";
  const [field, agreement] = opinion;
  if (agreement === "not in the reply") return say("; not in the model's reply", "；模型未答");
  const other = by === "classifier" ? ANSWERERS.model : ANSWERERS.classifier;
  if (agreement.startsWith("agree")) return say(`; the ${other} says the same`, `；${other}答案相同`);
  return say(`; not used, the ${other}'s answer: `, `；未采用的答案（${other}）：`) + (field.predicted.join(say(", ", "、")) || "–");
}

function reasonLines([label, share, score, trees, known, words, sentences, ofTrees], text) {
  const stages = [say("linear model ", "线性模型 ") + signed(score)];
  if (trees !== null) stages.push(say("trees ", "决策树 ") + signed(trees));
  if (known < 1) stages.push(say("share of the text that is known: ", "文中已知词句占比 ") + percent(known));
  const line = make("p", "", { class: "label" });
  line.append(make("b", `${label} ${percent(share)}`), " ", make("span", stages.join(say(", ", "，")), { class: "note" }));
  const characters = [...text];
  const quoted = sentences.map(([start, end, added]) => [characters.slice(start, end).join("").trim(), added]);
  const facts = ofTrees.map(([name, about, value, added]) => [featureOf(name) + (about ? say(": ", "：") + featureOf(about) : "") + ` (${value})`, added]);
  const grid = make("div", "", { class: "reasons" });
  const add = (name, parts, sign) => { // the parts that speak for the label (1) or against it (-1)
    const own = parts.filter(([, added]) => Math.sign(added) === sign);
    if (own.length === 0) return;
    const cell = make("div");
    for (const [part, added] of sign > 0 ? own : own.reverse()) {
      const span = make("span", part + " ");
      span.append(make("small", signed(added), { class: sign > 0 ? "right" : "missed" }));
      cell.append(span, " ");
    }
    grid.append(make("span", name), cell);
  };
  const spoken = words.map(([word, added]) => [inWords(word), added]);
  add(say("words for", "支持的词"), spoken, 1);
  add(say("against", "反对的词"), spoken, -1);
  add(say("sentence for", "支持的句子"), quoted, 1);
  add(say("against", "反对的句子"), quoted, -1);
  add(say("trees for", "决策树：支持"), facts, 1);
  add(say("against", "决策树：反对"), facts, -1);
  return [line, grid];
}

function factsBlock(text) {
  const facts = make("div", "", { id: "facts" });
  facts.append(...text.map(([piece, index]) => index === null ? piece : nameOf(piece, index)));
  return facts;
}

function nameOf(text, index) {
  const name = make("span", text, { class: "name" });
  name.style.setProperty("--hue", hue(index));
  return name;
}

function itemSection([name, fields], index, example) {
  const { opinions, whys } = example;
  const section = make("section");
  if (name) {
    const heading = make("h4");
    heading.append(nameOf(name, index));
    section.append(heading);
  }
  section.append(fieldTable(fields, opinions[index], whys[index]));
  const hasReasons = whys[index]?.length === fields.length && whys[index].some(([, , likeliest]) => likeliest.length);
  if (hasReasons) section.append(whyFold(fields, whys[index], opinions[index], wholeText(example)));
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
  add(say("← previous", "← 上一个"), index > 0, () => showCase(index - 1));
  add(say("next →", "下一个 →"), index + 1 < shown.length, () => showCase(index + 1));
  add(say("list", "列表"), true, () => buttons[index].focus());
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
  for (const button of buttons) {
    button.removeAttribute("aria-current");
    button.tabIndex = -1; // one Tab stop for the list; the arrow keys move in it
  }
  buttons[index].setAttribute("aria-current", "true");
  buttons[index].tabIndex = 0;
  const raw = make("details");
  raw.append(make("summary", say("raw reply of the model", "模型原始输出")), ...example.reply.map((text) => make("pre", text)));
  const notes = Object.entries(example.groups).map(([name, value]) => labelOf(name) + say(": ", "：") + value);
  for (const [kind, note] of Object.entries(example.handled)) {
    notes.push(say(note, [HANDLED[kind], ...note.split(": ").slice(1).map(labelOf)].join("：")));
  }
  const line = make("p", notes.join(" · "), { class: "note" });
  if (example.confidence !== null) {
    const text = say("mean confidence: ", "平均置信度：") + example.confidence.toFixed(2);
    line.prepend(make("meter", "", { value: example.confidence, "aria-hidden": "true" }), " ", text, notes.length ? " · " : "");
  }
  document.getElementById("case").replaceChildren(
    make("h3", example.id), stepButtons(index), line,
    ...example.items.map((item, index) => itemSection(item, index, example)), factsBlock(example.text), ...(example.reply.length ? [raw] : []));
}

for (const link of document.querySelectorAll("#language a")) link.addEventListener("click", keepChoices);
addFilters();
current = cases[address.get("case")] ?? null;
showList();
if (!current && shown.length && matchMedia("(min-width: 45em)").matches) fillCase(0); // on a phone the list comes first
