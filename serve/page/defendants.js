// The names that the facts have after 被告人, for the user to check. What is surely no name is left out.

const HAN = "[\u3400-\u9fff]";
const STEMS = "甲乙丙丁戊己庚辛壬癸";
const HIDDEN = "[×XxＸ*＊]";
const MARK = `(?:[${STEMS}]{1,2}|[A-Za-z](?![A-Za-z])|[1-9]\\d?(?![\\d年月日时点万元余名次个]))`; // 张某甲, 张某A, 张某12
const COMPOUND = "(?:欧阳|司马|上官|诸葛|东方|皇甫|尉迟|公孙|慕容|令狐|司徒|夏侯|端木|独孤|南宫|拓跋)";
// 于 is a word more often; so is what is left out here: 时, 成, 单, 解, 强, 原, 代, 向, 从.
const SURNAME = `(?:[王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯董萧程曹袁邓许傅沈曾彭吕苏卢蒋蔡贾丁魏薛叶阎余潘杜戴夏钟汪田任姜范方石姚谭廖邹熊金陆郝孔白崔康毛邱秦江史顾侯邵孟龙万段雷钱汤尹黎易常武乔贺赖龚文庞樊兰殷施陶洪翟安颜倪严牛温芦季俞章鲁葛伍韦申尤毕聂丛焦项柏邢路岳齐梅莫庄辛管祝左涂谷祁舒耿牟卜詹关苗凌费纪靳盛童欧甄曲游阳裴席卫查屈鲍位覃霍翁隋植甘景薄包司柴蒙尚宁华阮滕闵柳甯娄燕佟冉农蓝蒲卓仇鞠敖仲封占晏冷麦瞿褚奚宗车沙米栾桂边胥党苟郎楚闫肖付岑缪简鄢晁井蔺]|于(?![当同前次本此案上是今去年后某]))`;

// Forms of a name, by what comes after 被告人. The name of some may have one character more: see `nameAt`.
const DOTTED = new RegExp(`^(?:${HAN}{1,12}·)+`); // 买买提·某某, 艾力·买买提
// 张某, 李×1, 欧阳某某; not 在某, 于某日
const MASKED = new RegExp(`^(?![在将把被对让给到按用]|[于从向和]某[年月日时天晚市县区省镇村乡地处公酒宾饭商超网])(?:${COMPOUND}|${HAN}|[A-Z])(?:某某?|${HIDDEN}{1,2})${MARK}?`);
const LONG_MASKED = new RegExp(`^${HAN}{2,3}(?:某某?|${HIDDEN}{1,2})${MARK}?`); // 阿卜杜某甲, 辛一×
const PLAIN = new RegExp(`^(?:${COMPOUND}|${SURNAME})${HAN}`);
const MAY_HAVE_MORE = new RegExp(`^.{1,2}(?:某|${HIDDEN})$`); // 张某, and not 张某某 or 张某甲
const IS_HAN = new RegExp(HAN);
const STEM = new RegExp(`^[${STEMS}]`);

const WORDS = "在于的等与和及被将又因以为从到向对把让给有无未已经并且即则便遂后时前其该此他她们是系均共先再还也曾应受由至自按用去"; // none is a given name's
const VERBS = "伙同|通过|明知|安排|利用|分别|联系|购买|指使|指派|驾驶|驾车|参与|负责|作为|归案|主动|收取|收到|收受|帮|先后|持|贩卖|贩毒|提|抓获|纠集|商量|商议|预谋|组织|介绍|担任|使用|采取|采用|单独|独自|实施|多次|非法|租住|租用|销售|出售|电话|打|携带|接到|要求|同意|窜至|来到|赶到|进入|冒充|冒用|伪造|虚构|隐瞒|诈骗|盗窃|抢劫|退赔|退缴|赔偿|供述|辩称|手中|家中|处|一起|一同|一人|二人|三人|两人|四人|承担|协助|陪同|随身|左手|右手|头部|面部|强行|酒后|现场|所有|名下|见|得知|发现|认|滥用|身为|身上|犯|趁|邀|约|跟|同|带|找|骗|欲|称|途|拿|卖|买|看|说|叫|问|想|逃|开车|开始|违反|结伙|结识|合谋|密谋|经营|成立|注册|委托|雇佣|雇请|累计|共计|位于|分给|占有|占用|变卖|仍|送|任|转|不|涉";
const NAME_ENDS = new RegExp(`^(?:$|(?!${HAN}).|[${WORDS}]|${VERBS})`);
const LONG_VERBS = VERBS.split("|").filter((verb) => verb.length > 1).join("|"); // 买买提 has a short one
const LAST_PART = new RegExp(`^(?:(?:某某?|${HIDDEN}{1,2})${MARK}?|${HAN}{1,12}?(?=$|(?!${HAN}).|[${WORDS}]|${LONG_VERBS}))`);
const APART = /另案|另处|另行|另诉|在逃|已[判处诉起决死行]|未到案|不起诉|死亡|追逃|待查/; // another court's

export function defendantsIn(facts) {
  const text = facts.replace(/\s+/g, "").replaceAll("(", "（").replaceAll(")", "）")
    .replace(/[•‧・･∙⋅●]/g, "·").replace(/[０-９Ａ-Ｚａ-ｚ]/g, (wide) => wide.normalize("NFKC"));
  const called = new Set();
  const apart = new Set();
  const known = new Map(); // what comes after 被告人 -> the name in it: most come often
  const next = (rest) => {
    const start = rest.slice(0, 40);
    if (!known.has(start)) known.set(start, nameAt(start, text));
    return known.get(start);
  };
  for (const found of text.matchAll(/被告人/g)) {
    let rest = text.slice(found.index + 3).replace(/^(?:（[^（）]*）|[）：:])+/, ""); // 上诉人（原审被告人）张某
    const list = []; // 被告人张某甲、李某乙
    for (let name = next(rest); name; name = next(rest)) {
      list.push(name);
      const [whole, aside] = /^((?:（[^（）]*）)*)(?:、(?!被告人))?/.exec(rest.slice(name.length));
      if (APART.test(aside)) list.slice(-howMany(aside, list.length)).forEach((one) => apart.add(one));
      rest = whole.endsWith("、") ? rest.slice(name.length + whole.length) : "";
    }
    list.forEach((one) => called.add(one));
  }
  return [...called].filter((name) => !apart.has(name));
}

// How many of the names before it an aside is about: （另案处理）, （二人另案处理）, （均在逃） less the first name.
function howMany(aside, length) {
  const number = "一二三四五六七八九".indexOf(/([一二两三四五六七八九])人/.exec(aside)?.[1].replace("两", "二") ?? "无");
  if (number >= 0) return number + 1;
  return /均|都/.test(aside) ? Math.max(1, length - 1) : 1;
}

// The name at the start of `rest`, a part of the text; "" if there is none.
function nameAt(rest, text) {
  const dotted = DOTTED.exec(rest)?.[0];
  const last = dotted && LAST_PART.exec(rest.slice(dotted.length))?.[0];
  if (last) return dotted + last;
  const masked = MASKED.exec(rest)?.[0];
  if (masked) return withGivenName(masked, rest, text, false);
  const long = LONG_MASKED.exec(rest)?.[0];
  if (long) return !WORDS.includes(long[0]) && text.split(long).length > 2 ? long : "";
  const plain = PLAIN.exec(rest)?.[0];
  if (plain) return NAME_ENDS.test(rest.slice(plain.length - 1)) ? "" : withGivenName(plain, rest, text, true);
  return STEM.test(rest) && NAME_ENDS.test(rest.slice(1)) ? rest[0] : "";
}

// The name with one more character, if that is a given name's: 张某军, 王建国. That it stands in
// several places, each time before another character, tells it from the first one of a word.
function withGivenName(name, rest, text, isPlain) {
  const next = rest[name.length] ?? "";
  if (!(isPlain || MAY_HAVE_MORE.test(name)) || !IS_HAN.test(next) || WORDS.includes(next)) return name;
  const longer = name + next;
  const places = text.split(longer).slice(1);
  const isOften = new Set(places.map((after) => after[0])).size > 1;
  const isAlways = text.split(name).length === places.length + 1;
  if (NAME_ENDS.test(rest.slice(name.length))) return isOften && isAlways ? longer : name;
  return isPlain || isOften || /^[、（]/.test(rest.slice(longer.length)) ? longer : name;
}
