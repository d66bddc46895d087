// The page: a case in, cards out. Text of a case only ever becomes text nodes, never markup.

const TEXTS = {
  zh: {
    notice: "这是统计推测，不是判决，也不是法律意见。",
    fact: "案件事实", factHint: "把案件事实粘贴到这里，被告人以“被告人某某”引出。",
    defendants: "被告人", defendantsHint: "留空则从事实中找出；找错了请改正后再问一次。",
    add: "添加一人", remove: "去掉", name: "姓名",
    samples: "方式", fast: "快：一次作答", careful: "稳：多次抽样后决定", key: "密钥",
    go: "推测", stop: "停止", result: "推测结果", highlight: "提到各被告人的句子", raw: "模型的原话",
    charges: "罪名", articles: "法条", penalty: "刑罚", article: (a) => `第${a}条`,
    asking: "正在写……", stopped: "已停止。",
    done: (n, s, t) => `${n} 名被告人，${s} 秒，${t} 个输出词元。`,
    repaired: (r) => `回答有 ${r} 处经过修补。`, dropped: (d) => `案情过长，略去 ${d} 句。`,
    empty: "请先填写案件事实。", noKey: "需要密钥。", offline: "连不上服务，请确认它仍在运行。",
    other: "English",
  },
  en: {
    notice: "This is a statistical guess, not a judgment and not legal advice.",
    fact: "Facts of the case", factHint: "Paste the facts here; defendants are introduced by 被告人.",
    defendants: "Defendants", defendantsHint: "Left empty, they are found in the facts; correct them and ask again.",
    add: "Add one", remove: "Remove", name: "Name",
    samples: "How", fast: "Fast: one reply", careful: "Careful: decide from samples", key: "Key",
    go: "Guess", stop: "Stop", result: "The guess", highlight: "Sentences that name each defendant", raw: "What the model wrote",
    charges: "Charges", articles: "Articles", penalty: "Penalty", article: (a) => `Art. ${a}`,
    asking: "Writing …", stopped: "Stopped.",
    done: (n, s, t) => `${n} defendants, ${s} s, ${t} output tokens.`,
    repaired: (r) => `${r} repairs were made to the reply.`, dropped: (d) => `Too long: ${d} sentences were left out.`,
    empty: "Please enter the facts first.", noKey: "A key is needed.", offline: "The server does not answer; is it still running?",
    other: "中文",
  },
};

const $ = (id) => document.getElementById(id);
const hue = (i) => `hsl(${(210 + i * 137.5) % 360} 62% 48%)`;
let words = TEXTS[navigator.language.startsWith("zh") ? "zh" : "en"];
let running = null;
let law = null; // article -> text, fetched once
let shown = null; // the last result, to show it again in the other language
let touched = false; // whether the names are the user's own

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function translate() {
  document.documentElement.lang = words === TEXTS.zh ? "zh" : "en";
  for (const node of document.querySelectorAll("[data-text]")) node.textContent = words[node.dataset.text];
  for (const node of document.querySelectorAll("[data-hint]")) node.placeholder = words[node.dataset.hint];
  $("language").textContent = words.other;
  setNames(names());
  if (shown) show(shown);
}

const names = () => [...$("names").querySelectorAll("input")].map((input) => input.value.trim()).filter(Boolean);

function setNames(list) {
  $("names").replaceChildren(...list.map(chip));
}

function chip(name, i) {
  const item = element("li", { class: "chip" });
  const input = element("input", { value: name, "aria-label": words.name, maxlength: "40" });
  const remove = () => {
    touched = true;
    item.remove();
    $("add").focus();
  };
  const close = element("button", { type: "button", onclick: remove }, "×");
  const label = () => close.setAttribute("aria-label", `${words.remove} ${input.value}`);
  input.addEventListener("input", label);
  label();
  item.append(input, close);
  item.style.setProperty("--hue", hue(i));
  return item;
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// Server-sent events of a response, as [event, data].
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

async function post(body, signal) {
  const response = await fetch("v1/judgments", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (response.ok) return response;
  if (response.status === 401) {
    $("keyed").hidden = false;
    $("key").focus();
    throw new Error(words.noKey);
  }
  throw new Error((await response.json()).error.message);
}

async function ask(event) {
  event.preventDefault();
  if (running) return; // Ctrl+Enter does not heed the button
  complain("");
  const fact = $("fact").value;
  if (!fact.trim()) {
    complain(words.empty);
    $("fact").focus();
    return;
  }
  const began = performance.now();
  running = new AbortController();
  $("go").disabled = true;
  $("stop").hidden = false;
  try {
    const given = names();
    const body = { fact, samples: Number($("samples").value), stream: true, ...(given.length ? { defendants: given } : {}) };
    const response = await post(body, running.signal);
    law ??= (await (await fetch("v1/labels", { headers: headers() })).json()).law ?? {};
    shown = null;
    $("result").hidden = false;
    $("cards").replaceChildren();
    $("marked").replaceChildren();
    $("raw").textContent = "";
    $("state").textContent = words.asking;
    for await (const [kind, data] of events(response)) {
      if (kind === "start") {
        setNames(data.defendants);
        touched = touched && given.length > 0;
      }
      if (kind === "delta") $("raw").textContent += data.text;
      if (kind === "error") throw new Error(data.error.message);
      if (kind === "result") show({ ...data, fact, seconds: (performance.now() - began) / 1000 });
    }
  } catch (error) {
    if (error.name === "AbortError") $("state").textContent = words.stopped;
    else complain(error instanceof TypeError ? words.offline : error.message);
    if (!shown) $("state").textContent = error.name === "AbortError" ? words.stopped : "";
  } finally {
    running = null;
    $("go").disabled = false;
    $("stop").hidden = true;
  }
}

function show(result) {
  shown = result;
  const notes = [words.done(result.defendants.length, result.seconds.toFixed(1), result.usage.completion_tokens)];
  if (result.repairs.length) notes.push(words.repaired(result.repairs.length));
  if (result.dropped_sentences) notes.push(words.dropped(result.dropped_sentences));
  $("state").textContent = notes.join(" ");
  $("cards").replaceChildren(...result.answer.judgments.map((judgment, i) => card(judgment, i, result)));
  mark(result);
}

function card(judgment, i, result) {
  const sure = result.confidence?.[i] ?? {};
  const made = element(
    "article",
    { tabindex: "0", onmouseenter: () => pick(i), onfocus: () => pick(i), onmouseleave: () => pick(-1), onblur: () => pick(-1) },
    element("h3", {}, judgment.name),
    element(
      "dl", {},
      ...field("charges", sure, judgment.charges.map((charge) => element("p", {}, charge))),
      ...field("articles", sure, judgment.articles.map(article)),
      ...field("penalty", sure, [element("p", {}, judgment.penalty), bars(result.probabilities?.[i]?.penalty ?? {})]),
    ),
  );
  made.style.setProperty("--hue", hue(i));
  return made;
}

const percent = (share) => `${Math.round(share * 100)}%`;

function field(name, sure, values) {
  const told = name in sure ? [element("span", {}, percent(sure[name]))] : [];
  return [element("dt", {}, element("span", {}, words[name]), ...told), element("dd", {}, ...values)];
}

function article(number) {
  const text = law?.[number];
  return element("p", {}, words.article(number), ...(text ? [element("small", {}, text.length > 60 ? `${text.slice(0, 60)}……` : text)] : []));
}

function bars(shares) {
  const likeliest = Object.entries(shares).sort((a, b) => b[1] - a[1]).slice(0, 6).filter(([, share]) => share >= 0.005);
  return element("ul", { class: "bars" }, ...likeliest.map(([name, share]) => element(
    "li", {},
    element("b", {}, name.replace("有期徒刑", "")),
    element("meter", { value: share, "aria-label": `${name} ${percent(share)}` }),
    element("span", { "aria-hidden": "true" }, percent(share)),
  )));
}

function mark(result) {
  const sentences = result.fact.match(/[^。！？；\n]*[。！？；\n]*/gu).filter(Boolean);
  $("marked").replaceChildren(...sentences.map((sentence) => {
    const who = named(sentence, result.defendants);
    if (!who.length) return document.createTextNode(sentence);
    const made = element("mark", { "data-who": who.join(" ") }, sentence);
    made.style.setProperty("--hue", hue(who[0]));
    return made;
  }));
}

// The places of those who are named in a sentence; 张某甲 does not name 张某.
function named(sentence, everybody) {
  const found = [];
  for (const name of [...everybody].sort((a, b) => b.length - a.length)) {
    if (!sentence.includes(name)) continue;
    found.push(everybody.indexOf(name));
    sentence = sentence.replaceAll(name, "\n");
  }
  return found.sort((a, b) => a - b);
}

function pick(i) {
  for (const made of $("marked").querySelectorAll("mark")) {
    const hit = made.dataset.who.split(" ").includes(String(i));
    made.classList.toggle("picked", hit);
    if (hit) made.style.setProperty("--hue", hue(i));
  }
}

$("ask").addEventListener("submit", ask);
$("stop").addEventListener("click", () => running?.abort());
$("add").addEventListener("click", () => {
  touched = true;
  const made = chip("", $("names").children.length);
  $("names").append(made);
  made.querySelector("input").focus();
});
$("fact").addEventListener("input", () => {
  const kept = touched ? names().filter((name) => $("fact").value.includes(name)) : [];
  touched = kept.length > 0;
  if (kept.length < names().length) setNames(kept); // the others belonged to another text
});
$("names").addEventListener("input", () => { touched = true; });
$("fact").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
$("language").addEventListener("click", () => {
  words = words === TEXTS.zh ? TEXTS.en : TEXTS.zh;
  translate();
});
translate();
