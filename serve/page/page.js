// The page sends a case and shows its judgments. Text of a case becomes text nodes, never markup.
import { defendantsIn } from "./defendants.js";

// An article's id as people read it: 第二百八十七条之二, 第三百五十八条第一款.
function articleName(id) {
  const parts = /^([1-9]\d{0,2})(?:\.(\d{1,2}))?(?:-(\d{1,2}))?$/.exec(id);
  if (!parts) return id;
  const [, article, inserted, paragraph] = parts;
  return `第${numeral(article)}条${inserted ? `之${numeral(inserted)}` : ""}${paragraph ? `第${numeral(paragraph)}款` : ""}`;
}

// "287" -> 二百八十七, "105" -> 一百零五; at most three digits.
function numeral(text) {
  const digits = "〇一二三四五六七八九", [hundreds, tens, ones] = text.padStart(3, "0").split("").map(Number);
  const ten = tens ? `${tens === 1 && !hundreds ? "" : digits[tens]}十` : hundreds && ones ? "零" : "";
  return `${hundreds ? `${digits[hundreds]}百` : ""}${ten}${ones ? digits[ones] : ""}`;
}

const TEXTS = {
  zh: {
    notice: "模型根据案件事实预测每名被告人的罪名、法条和刑罚。这是统计预测，不是判决，也不是法律意见。",
    demo: "现在回答的是演示用的小模型，它的基座是用 panjue base 命令从零训练的。它的答案没有任何法律意义。",
    example: "示例案件",
    fact: "案件事实", factHint: "把案件事实粘贴到这里。",
    defendants: "被告人", defendantsHint: "每名被告人填一项，姓名与事实中的写法一致。",
    proposed: "姓名取自事实中“被告人”之后的文字。请核对：补上遗漏的，移除不属于本案的。",
    add: "添加被告人", remove: "移除", name: "姓名",
    key: "密钥", go: "预测", stop: "停止", result: "预测结果", highlight: "提到各被告人的句子", raw: "模型原始输出",
    charges: "罪名", articles: "法条", penalty: "刑罚",
    asking: "正在生成……", stopped: "已停止。",
    done: (n, s, t) => `${n} 名被告人，${s} 秒，${t} 个输出 token。`,
    field: "字段", answer: "答案", notTaken: "未采用的答案", model: "模型", classifier: "文本分类器", differs: "≠ 不一致", unsaid: "模型未答",
    chance: (p) => `置信度 ${p}`, chances: "各刑罚档次的概率",
    confidence: "置信度：该项答案完全正确的概率，由文本分类器估计；模型若已回答过验证集，则模型自身的概率也计入。",
    odd: "请核对：训练数据中，该法条从未与所列罪名同时适用。",
    repaired: (r) => `模型输出经过 ${r} 处修复。`, dropped: (d) => `案件事实过长，略去了 ${d} 句。`,
    unnamed: (names) => `请核对：事实中没有提到${names}。`,
    empty: "请先填写案件事实。", noNames: "请添加被告人的姓名。", checkNames: "被告人是根据事实填入的，请核对后再点“预测”。", noKey: "需要密钥。", badKey: "密钥只能含英文字母、数字和半角符号。",
    offline: "连不上服务器，请确认它仍在运行。",
    other: "English",
  },
  en: {
    notice: "A model reads the facts of a criminal case and guesses each defendant's charges, articles and penalty. This is a statistical guess. It is not a judgment and not legal advice.",
    demo: "A tiny demo model answers. The demo's base model was trained from nothing by the command panjue base. Its answers have no legal meaning.",
    example: "Example case",
    fact: "Facts of the case", factHint: "Paste the facts here.",
    defendants: "Defendants", defendantsHint: "Enter one name for each defendant, written as in the facts.",
    proposed: "These names follow 被告人 in the facts. Check them: add missing defendants, and remove persons who are not tried here.",
    add: "Add a defendant", remove: "Remove", name: "Name",
    key: "Key", go: "Guess", stop: "Stop", result: "Result", highlight: "Sentences that name each defendant", raw: "The model's reply",
    charges: "Charges", articles: "Articles", penalty: "Penalty",
    asking: "Writing …", stopped: "Stopped.",
    done: (n, s, t) => `${n} defendants, ${s} s, ${t} output tokens.`,
    field: "Field", answer: "Answer", notTaken: "Not taken", model: "Model", classifier: "Text classifier", differs: "≠ differs", unsaid: "not in the reply",
    chance: (p) => `confidence ${p}`, chances: "Penalties: probabilities",
    confidence: "Confidence: the probability that exactly this answer is right. The text classifier estimates it. If the model has answered held-out cases, its own probability counts, too.",
    odd: "Check this: no training case has this article with these charges.",
    repaired: (r) => `${r} repairs were made to the reply.`, dropped: (d) => `The case is too long, so ${d} sentences were left out.`,
    unnamed: (names) => `Check this: the facts do not name ${names}.`,
    empty: "Please enter the facts first.", noNames: "Please add the names of the defendants.", checkNames: "The defendants were filled in from the facts. Please check them, then press Guess.", noKey: "A key is needed.", badKey: "A key may have only Latin letters, digits and ASCII signs.",
    offline: "The server does not answer. Check that it is still running.",
    other: "中文",
  },
};

const $ = (id) => document.getElementById(id);
// The color of defendant i; steps of 137.5 degrees (the golden angle) never come near an earlier color.
const hue = (i) => `hsl(${(210 + i * 137.5) % 360} 62% 48%)`;
let texts = TEXTS[navigator.language.startsWith("zh") ? "zh" : "en"];
let running = null; // AbortController of the current request
let labels = null; // the answer of v1/labels, fetched once
let lastResult = null; // displayed again when the language changes
let proposed = ""; // the names that came from the facts

// A new element. An attribute such as onclick is a listener; the others are set.
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function translate() {
  document.documentElement.lang = texts === TEXTS.zh ? "zh" : "en";
  for (const node of document.querySelectorAll("[data-text]")) node.textContent = texts[node.dataset.text];
  for (const node of document.querySelectorAll("[data-hint]")) node.placeholder = texts[node.dataset.hint];
  $("language").textContent = texts.other;
  setNames(names());
  if (lastResult) show(lastResult);
}

const names = () => [...$("names").querySelectorAll("input")].map((input) => input.value.trim()).filter(Boolean);

function setNames(list) {
  $("names").replaceChildren(...list.map(chip));
}

// Fills in the defendants whom the facts name, unless the user has named any; says whether it did.
function propose() {
  const own = names().join();
  $("proposed").hidden = true;
  if (own && own !== proposed) return false;
  const found = defendantsIn($("fact").value);
  proposed = found.join();
  setNames(found);
  $("proposed").hidden = !found.length;
  return found.length > 0;
}

// The input for a defendant's name, with the button that removes it.
function chip(name, i) {
  const item = element("li", { class: "chip" });
  const input = element("input", { value: name, "aria-label": texts.name, maxlength: "40" });
  const remove = () => {
    item.remove();
    $("add").focus();
  };
  const close = element("button", { type: "button", onclick: remove }, "×");
  const label = () => close.setAttribute("aria-label", `${texts.remove} ${input.value}`);
  input.addEventListener("input", label);
  label();
  item.append(input, close);
  item.style.setProperty("--hue", hue(i));
  return item;
}

function showProblem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// Yields the server-sent events of a response as [event, data].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [event, data] = part.split("\n");
      yield [event.slice("event: ".length), JSON.parse(data.slice("data: ".length))];
    }
  }
}

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// Sends a case and returns the response; if the key is missing or wrong, shows the input for it.
async function post(body, signal) {
  if (!/^[\x20-\x7e]*$/.test($("key").value)) throw new Error(texts.badKey);
  const response = await fetch("v1/judgments", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (response.ok) return response;
  if (response.status === 401) {
    $("keyed").hidden = false;
    $("key").focus();
    throw new Error(texts.noKey);
  }
  throw new Error((await response.json()).error.message);
}

// Without a key, or while the engine starts, there are no labels yet: `ask` tries again.
async function loadLabels() {
  const response = labels ? null : await fetch("v1/labels", { headers: headers() }).catch(() => null);
  if (!response?.ok) return;
  labels = await response.json();
  $("demo").hidden = !labels.demo;
}

async function fillExample() {
  try {
    const sample = await (await fetch("sample.json")).json();
    $("fact").value = sample.fact;
    setNames(sample.defendants);
    $("proposed").hidden = true;
  } catch {
    showProblem(texts.offline);
    return;
  }
  showProblem("");
  $("fact").dispatchEvent(new Event("input"));
  $("go").focus();
}

async function ask(event) {
  event.preventDefault();
  if (running) return; // Ctrl+Enter also works while the button is disabled
  showProblem("");
  const fact = $("fact").value;
  const defendants = names();
  if (!fact.trim()) {
    showProblem(texts.empty);
    $("fact").focus();
    return;
  }
  if (!defendants.length) {
    const isProposed = propose();
    showProblem(isProposed ? texts.checkNames : texts.noNames);
    (isProposed ? $("names").querySelector("input") : $("add")).focus();
    return;
  }
  const start = performance.now();
  forgetResult();
  running = new AbortController();
  $("go").disabled = true;
  $("stop").hidden = false;
  try {
    const response = await post({ fact, defendants, stream: true }, running.signal);
    await loadLabels();
    $("result").hidden = false;
    $("cards").replaceChildren();
    $("marked").replaceChildren();
    $("raw").textContent = "";
    $("state").textContent = texts.asking;
    for await (const [kind, data] of events(response)) {
      if (kind === "delta") $("raw").append(data.text);
      if (kind === "error") throw new Error(data.error.message);
      if (kind === "result") show({ ...data, seconds: (performance.now() - start) / 1000 });
    }
  } catch (error) {
    const isStopped = error.name === "AbortError";
    $("state").textContent = texts.stopped;
    $("result").hidden = !isStopped || $("fact").value !== fact;
    const isOffline = error instanceof TypeError || error instanceof SyntaxError; // a proxy's page is no JSON
    if (!isStopped) showProblem(isOffline ? texts.offline : error.message);
  } finally {
    running = null;
    $("go").disabled = false;
    $("stop").hidden = true;
    // A disabled button loses the focus, which goes to the answer, or back to the button.
    if (document.activeElement === document.body) $(lastResult ? "result-title" : "go").focus();
  }
}

// An old answer must never be shown under a new case.
function forgetResult() {
  running?.abort();
  lastResult = null;
  $("result").hidden = true;
}

function show(result) {
  lastResult = result;
  const notes = [texts.done(result.defendants.length, result.seconds.toFixed(1), result.usage.completion_tokens)];
  if (result.confidence) notes.push(texts.confidence);
  if (result.repairs.length) notes.push(texts.repaired(result.repairs.length));
  if (result.dropped_sentences) notes.push(texts.dropped(result.dropped_sentences));
  const named = new Set(result.sentences.flatMap((sentence) => sentence.defendants));
  const unnamed = result.defendants.filter((name, i) => !named.has(i));
  if (unnamed.length) notes.push(texts.unnamed(unnamed.join("、")));
  $("state").textContent = notes.join(" ");
  $("cards").replaceChildren(...result.answer.judgments.map((judgment, i) => card(judgment, i, result)));
  mark(result);
}

// The answers on defendant i. Pointing at them marks the sentences that name the defendant.
function card(judgment, i, result) {
  const node = element(
    "article",
    { tabindex: "0", onmouseenter: () => pick(i), onfocus: () => pick(i), onmouseleave: () => pick(-1), onblur: () => pick(-1) },
    element("h3", {}, judgment.name),
    element("table", {}, ...head(result), ...["charges", "articles", "penalty"].map((name) => row(name, i, result))),
    ...bars(result.probabilities?.[i]?.penalty),
  );
  node.style.setProperty("--hue", hue(i));
  return node;
}

const OTHER = { model: "classifier", classifier: "model" };
const isMixed = ({ answered_by }) => new Set(Object.values(answered_by)).size > 1;

// The head of the table: the answers, and beside them those that were not taken. A model alone has none.
function head(result) {
  if (!result.classifier) return [];
  const [by] = Object.values(result.answered_by);
  const columns = isMixed(result) ? [texts.answer, texts.notTaken] : [texts[by], texts[OTHER[by]]];
  return [element("tr", {}, ...[texts.field, ...columns].map((text) => element("th", { scope: "col" }, text)))];
}

// The row of a field: its name, the answer with its confidence, and the answer that was not taken.
function row(name, i, result) {
  const judgment = result.answer.judgments[i];
  const title = element("th", { scope: "row" }, texts[name]);
  const answer = element("td", {}, ...values(name, judgment));
  if (!result.classifier) return element("tr", {}, title, answer);
  const by = result.answered_by[name];
  const who = (one) => (isMixed(result) ? [texts[one]] : []); // if it is not the same for all fields
  answer.append(element("small", {}, [texts.chance(percent(result.confidence[i][name])), ...who(by)].join(" · ")));
  const other = result[OTHER[by]][i];
  const opinion = element("td", {}, ...(other[name] === null ? [element("p", {}, texts.unsaid)] : values(name, other)));
  opinion.append(...who(OTHER[by]).map((text) => element("small", {}, text)));
  const isDifferent = other[name] !== null && asText(other[name]) !== asText(judgment[name]);
  if (isDifferent) opinion.append(element("small", { class: "differs" }, texts.differs));
  return element("tr", {}, title, answer, opinion);
}

const asText = (value) => [value].flat().sort().join("、"); // of a class or a label set, whose order does not matter

function values(name, judgment) {
  if (name === "articles") return judgment.articles.map((id) => article(id, judgment.charges));
  return [judgment[name]].flat().map((value) => element("p", {}, value));
}

// Says whether to check an article: no training case has it with any of these charges.
function article(id, charges) {
  const isOdd = charges?.length && charges.every((charge) => labels?.pairs[charge] && !(id in labels.pairs[charge]));
  return element("p", {}, articleName(id), ...(isOdd ? [element("small", {}, texts.odd)] : []));
}

// A guess is never certain, and a listed one is never impossible.
const percent = (share) => (share > 0.99 ? "> 99%" : share < 0.01 ? "< 1%" : `${Math.round(share * 100)}%`);

// The likeliest penalties, as bars; `shares` has the probability of each.
function bars(shares) {
  if (!shares) return [];
  const likeliest = Object.entries(shares).sort((a, b) => b[1] - a[1]).slice(0, 6).filter(([, share]) => share >= 0.005);
  const list = element("ul", { class: "bars" }, ...likeliest.map(([name, share]) => element(
    "li", {},
    element("b", {}, name.replace("有期徒刑", "")),
    element("meter", { value: share, "aria-label": `${name} ${percent(share)}` }),
    element("span", { "aria-hidden": "true" }, percent(share)),
  )));
  return [element("h4", {}, texts.chances), list];
}

// Shows the facts, with the sentences that name defendants in their colors.
function mark(result) {
  $("marked").replaceChildren(...result.sentences.map(({ text: sentence, defendants: indices }) => {
    if (!indices.length) return document.createTextNode(sentence);
    const node = element("mark", { "data-defendants": indices.join(" ") }, sentence);
    // The colors alternate along the whole sentence, since no part of it is about one person alone.
    const stripes = indices.map((i, k) => `${hue(i)} ${k}em ${k + 1}em`);
    node.style.setProperty("--stripes", stripes.join(", "));
    return node;
  }));
}

// Emphasizes the sentences that name defendant i; none for -1.
function pick(i) {
  for (const node of $("marked").querySelectorAll("mark")) {
    const isNamed = node.dataset.defendants.split(" ").includes(String(i));
    node.classList.toggle("picked", isNamed);
    if (isNamed) node.style.setProperty("--hue", hue(i));
  }
}

$("ask").addEventListener("submit", ask);
$("example").addEventListener("click", fillExample);
$("stop").addEventListener("click", () => running?.abort());
$("add").addEventListener("click", () => {
  const node = chip("", $("names").children.length);
  $("names").append(node);
  node.querySelector("input").focus();
});
$("fact").addEventListener("input", ({ inputType }) => {
  forgetResult();
  if (inputType === "insertFromPaste" || inputType === "insertFromDrop") propose();
});
$("names").addEventListener("input", () => {
  forgetResult();
  $("proposed").hidden = true;
});
$("fact").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
$("language").addEventListener("click", () => {
  texts = texts === TEXTS.zh ? TEXTS.en : TEXTS.zh;
  translate();
});
translate();
loadLabels();
