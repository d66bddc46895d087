"""Read a judgment in words: 被告人张某犯盗窃罪，判处有期徒刑三年. Anything uncertain is an error.

If a clause of a text is not understood, the text is refused: the clause might be a second crime, or
the term that counts. The current persons are those whom the next clause is about: the last ones
named. The decision is the penalty for all crimes of a person together, after 决定执行. Accessory
clauses, such as 并处罚金二千元 or 缓刑一年, stand beside a penalty and do not change its term.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from panjue.prompts.plumbing.errors import NotSaid
from panjue.prompts.tasks.judgment.charges import charges_in
from panjue.prompts.tasks.judgment.citations import (
    SPACES,
    Cited,
    Plain,
    articles_by_person,
    cited_articles,
    without_citations,
)
from panjue.prompts.tasks.judgment.penalties import sentence
from panjue.prompts.tasks.judgment.terms import COUNT, EXEMPT, FORMAL, money_of, penalty_of

Outcome = dict[str, Any]
"""An entry of the official `outcomes`: name, penalty, charges, articles."""


class Verdict(NamedTuple):
    """What a judgment says about each person whom it sentences, in order."""

    outcomes: list[Outcome]
    of_nobody: tuple[str, ...]
    """Articles of the general part that are cited for several persons without saying for whom."""


def verdict_of(text: str, citing: str = "") -> Verdict:
    """Read a judgment. The text `citing`, if given, cites its articles in place of `text`.

    `依照《刑法》第264条,判决如下:张某犯盗窃罪,判处拘役四个月` gives 张某 the charge 盗窃罪, the
    article 264 and four months of `detention`.

    Raises:
        NotSaid: the text does not say for certain who is convicted of what, or sentenced to what.
    """
    plain, cited = _prepared(text)
    start = 0
    if follows := [*AS_FOLLOWS.finditer(plain.text)]:
        # Earlier citations may be from what the parties said.
        sentence_start = plain.text.rfind("。", 0, follows[-1].start()) + 1
        cited = [(place, article) for place, article in cited if place >= sentence_start]
        start = follows[-1].end()
    persons = _Reading(plain).persons(start)
    if citing:
        cited = [(-1, article) for article in cited_articles(citing)]  # before all persons
    starts = [person.start for person in persons]
    is_one_crime = len({frozenset(person.charges()) for person in persons}) == 1
    articles, of_nobody = articles_by_person(starts, cited, is_one_crime=is_one_crime)
    outcomes = []
    for person, own in zip(persons, articles, strict=True):
        outcomes.append(
            {
                "name": person.name,
                "penalty": person.penalty(),
                "charges": list(person.charges()),
                "articles": list(own),
            }
        )
    return Verdict(outcomes, of_nobody)


def principal_of(text: str, name: str = "") -> dict[str, Any]:
    """Return a person's official `penalty` from 拘役四个月，并处罚金二千元: the term and the fine.

    Raises:
        NotSaid: the words name no penalty, several, or another person than `name`.
    """
    plain, _ = _prepared(text)
    if WITHOUT_VERB.match(plain.text.translate(FORMAL)):
        plain, _ = _prepared(f"判处{text}")
    # The text need not name the person and the crime, so both have an empty name at first.
    unnamed = _Convict(name="", start=0, crimes=[_Crime(charges={"": None})])
    persons = _Reading(plain, unnamed).persons()
    named = [person for person in persons if person.name]
    if named and name and [person.name for person in named] != [name]:
        raise NotSaid("the penalty of another person", text)
    if len(named) > 1:
        raise NotSaid("penalties of several persons together", text)
    return persons[-1].penalty()  # of the named person, if there is one


def _prepared(text: str) -> tuple[Plain, Cited]:
    """Return the plain text without spaces, brackets and citations, and the articles cited."""
    plain = Plain.of(text)
    for pattern in (THOUSANDS, SPACES, BROKEN_LINE, BRACKETS):
        plain = plain.without(pattern)
    return without_citations(plain)


THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
BROKEN_LINE = re.compile(
    r"(?<=[^。;,:、!?\n])\n(?!被告|上诉人|[一二三四五六七八九十0-9]+[、.]|[^\n:]{1,9}:)"
)
"""Pattern of the end of a line within a sentence; list lines begin with title, number or key."""

WITHOUT_VERB = re.compile(
    rf"(?:{COUNT}(?:年|个月)|半年|有期徒刑|拘役|管制|无期徒刑|死刑|死缓|罚金|单处罚金|免)"
)

BRACKETS = re.compile(r"\((?!边\)|境\))[^()]*\)|〔[^〔〕]*〕|【[^【】]*】")
"""Pattern of brackets with aliases, dates of release or 未遂, but not of 国（边）境."""

AS_FOLLOWS = re.compile("(?:判决|裁判)如下")
CLAUSE = re.compile("[^,。;:!?\n]+")

TITLE = "(?:上诉人|原审被告人|原审上诉人|被告人|被告单位|被告|罪犯)"
CONVICTED = re.compile(
    r"(?P<names>.{0,200}?)其?(?:的?行为)?(?P<how>(?:已经?|均|分别|共同|依法|又|还|也|亦|确)*)"
    r"(?:触犯|构成|犯有?|成立)了?(?P<rest>.+罪.*)"
)
CONVICTED_BEFORE_NAME = re.compile(
    rf"(?:对{TITLE}(?P<name_before>.+?))?以(?P<charges>.+?罪)(?:对|判处|追究)?"
    rf"(?:{TITLE}(?P<name_after>.+?))?"
    r"(?:判处)?(?P<penalty>(?:有期徒刑|拘役|管制|无期徒刑|死刑|免予|罚金).*)"
)
SENTENCED = re.compile(
    r"(?:被|依法|应|应当|从轻|减轻|从重|从宽)*(?P<each>均|各|分别)?(?:被|依法)*(?:判处|处以|判|处(?![罚理分]))(?:刑罚)?(?P<penalty>.+)"
)
DECIDED = re.compile(
    r"(?:数罪并罚|合并|并罚后?|依法|最终|总|应当|决定|对其)*执行(?:刑期|刑罚|主刑)?(?:为)?(?P<penalty>.+)"
)
OF_NAMED = re.compile(
    rf"{TITLE}?(?P<name>.+?)(?P<penalty>(?:有期徒刑|拘役|管制|无期徒刑|死刑|免予|免除|罚金).*)"
)
OF_THE_NAMED = re.compile(rf"对{TITLE}?(?P<name>.+?)(?:判处|处以|处)(?P<penalty>.+)")
OF_A_ROLE = re.compile("[^系为是]{1,6}(?:系|为|是)(?:主犯|从犯|胁从犯|累犯|初犯|偶犯|自首)")
"""Pattern of a clause on a person's role, with or without a title: 李某系从犯."""

SUBJECT = re.compile(rf"{TITLE}(?P<names>.+?)其?的?行为(?:已经?|均|分别|也|亦)*")

PRINCIPAL = re.compile("有期徒刑|拘役|管制|无期徒刑|死刑|死缓")
FINE = re.compile("(?:单处|并处|处以|判处|处|科|执行|各)*罚金(?P<amount>.*)")
NUMERAL = re.compile("[0-9一二三四五六七八九十百千万壹贰叁肆伍陆柒捌玖拾佰仟]")

ACCESSORY = re.compile(
    r"(?:并处?|且|附加|另|还|各|均|分别|共|单处|处|合计|同时|继续|依法|予以|责令)*"
    r"(?:罚金|没收|剥夺政治权利|驱逐出境|退赔|追缴|退缴|退出|扣押|随案|作案|违法所得|赃|限制减刑|终身监禁"
    r"|禁止|缓刑|宣告缓刑|适用缓刑|缓期|社区矫正).*"
    r"|(?:总和刑期|合并刑期|总刑期|刑期总和|数罪并罚|实行数罪并罚|予以数罪并罚|并罚)[^决]*"
    r"|(?:上述)?(?:刑期|缓刑考验期|缓刑考验期限|罚金|刑罚).*(?:起|止|算|计算|缴纳|履行|折抵|内|满|日)"
    r"|(?:即)?自.*起(?:至.*止)?|至.*止|(?:先行)?(?:判决执行以前|判决以前|先行)羁押.*|羁押.*折抵.*"
    r"|.*(?:犯罪所得|违法所得|赃款|赃物|作案工具|毒品|手机|财物).*(?:没收|追缴|退赔|返还|上缴|发还|销毁).*"
)
"""Pattern of clauses beside a principal penalty that do not change it."""

AND_ACCESSORY = re.compile(
    "(.+?)((?:并处|并科|附加|宣告缓刑|适用缓刑|缓刑|剥夺政治权利|没收|驱逐).+)"
)

OF_TIME = re.compile("总和刑期|合并刑期|总刑期|刑期|缓刑|自|至|上述|先行|羁押|判决")
"""Pattern of the beginning of an accessory clause that may name a principal penalty: 刑期, 折抵."""

UNDECIDED = re.compile(
    "无罪|不构成|未构成|不成立|不负刑事|驳回|维持|发回|改判|不予|不起诉|终止审理|撤回|建议"
    "|曾因|因犯|前科|拟"
)
EARLIER = re.compile(
    "撤销.*(?:缓刑|假释).*|(?:与|连同|和).*(?:前罪|原判|余刑|尚未执行|没有执行|未执行|漏罪).*"
)
"""Pattern of an earlier sentence. Then only the penalty for all crimes together counts."""

NEUTRAL = re.compile(
    "共同犯罪|犯罪(?:事实|情节|嫌疑人?|行为|工具|时间|分子|后果|金额|数额|性质|对象|地点|未遂|中止|预备|既遂|活动)?"
    "|主犯|从犯|胁从犯|累犯|初犯|偶犯|再犯|惯犯|共犯|认罪认罚|认罪|悔罪|罪行|罪责|数罪并罚|罪名|量刑|刑事责任|刑事判决书?"
    "|刑事案件|刑事附带民事|刑法|侵犯|审判|判决|裁判|裁定"
    "|[0-9二〇零一三四五六七八九十]{2,4}年(?:[0-9一二三四五六七八九十]{1,2}月)?(?:[0-9一二三四五六七八九十]{1,3}日)?"
)
DANGER = re.compile(
    f"刑|罪|犯|判|死|拘役|管制|罚金|{COUNT}(?:年|个月)|第[0-9零一二三四五六七八九十百]+(?:[、和条款])"
)
"""Pattern of words that a clause must not have if it is not understood."""

BEGINNING = re.compile(
    r"(?:[一二三四五六七八九十]+、|[0-9]+[、.]|、|和|以及|及|其中|首先|其次|综上|因此|据此|故|现|特|本院认为|本院"
    r"|判决|其(?=犯|又犯)|且|同时|最后|另外|所述)+"
)


@dataclass
class _Crime:
    """Crimes of a person that have one penalty together."""

    charges: dict[str, None] = field(default_factory=dict)  # in order
    penalty: dict[str, Any] | None = None


@dataclass
class _Convict:
    """A person of a judgment, as far as it has been read."""

    name: str
    start: int  # place where the text first names the person
    crimes: list[_Crime] = field(default_factory=list)
    decided: list[dict[str, Any]] = field(default_factory=list)  # penalties after 决定执行
    fines: list[float | None] = field(default_factory=list)  # None if no amount is said
    fines_before_decision: int = 0  # number of `fines` before 决定执行
    has_earlier_sentence: bool = False

    def last_crime(self) -> _Crime:
        """Return the crime that was read last; a text may name a person without any."""
        if not self.crimes:
            raise NotSaid("a person without a crime", self.name)
        return self.crimes[-1]

    def is_waiting(self) -> bool:
        """Say whether the last crime has no penalty yet."""
        return bool(self.crimes) and self.crimes[-1].penalty is None

    def charges(self) -> dict[str, None]:
        return {charge: None for crime in self.crimes for charge in crime.charges}

    def penalty(self) -> dict[str, Any]:
        """Return the penalty to serve: the one decided for all crimes, or the only one."""
        if len(self.decided) > 1:
            raise NotSaid("several decisions on what to serve", self.name)
        penalties = [crime.penalty for crime in self.crimes]
        if not self.decided and self.has_earlier_sentence:
            raise NotSaid("an earlier sentence and no 决定执行", self.name)
        if not self.decided and len(penalties) > 1:
            raise NotSaid("several crimes and no 决定执行", self.name)
        principal = self.decided[0] if self.decided else penalties[0]
        if principal is None:
            raise NotSaid("a person without a penalty", self.name)
        # 决定执行有期徒刑五年,并处罚金三万元: this fine is the sum of those before it.
        fines = self.fines[self.fines_before_decision :] or self.fines
        amounts = [amount for amount in fines if amount is not None]
        return {
            **principal,
            "fine": sum(amounts),
            "fine_without_amount": bool(fines) and not amounts,
        }


class _Reading:
    """Reads the persons of a judgment clause by clause."""

    def __init__(self, plain: Plain, unnamed: _Convict | None = None) -> None:
        """Start with nobody, or with a convict whom the text need not name."""
        self._plain = plain
        self._current = [unnamed] if unnamed else []  # the persons whom the next clause is about
        self._persons = {person.name: person for person in self._current}
        # True after 撤销…缓刑 before any name. Then everybody named later may have the revoked
        # sentence, and so needs a decision (决定执行).
        self._earlier_sentence_of_anybody = False

    def persons(self, start: int = 0) -> list[_Convict]:
        """Read all clauses from a place on, and return the persons; each has a crime."""
        for clause in CLAUSE.finditer(self._plain.text, start):
            self._read(clause.start(), clause.end())
        if not self._persons:
            raise NotSaid("no person with a crime")
        for person in self._persons.values():
            if not person.crimes:
                raise NotSaid("a person without a crime", person.name)
        return list(self._persons.values())

    def _read(self, start: int, end: int) -> None:
        """Read one clause; refuse it if it may matter and is not understood."""
        text = self._plain.text[start:end]
        if beginning := BEGINNING.match(text):
            start += beginning.end()
            text = text[beginning.end() :]
        if not text:
            return
        if UNDECIDED.search(text):
            raise NotSaid("an acquittal, an appeal, a proposal or an earlier conviction", text)
        understood = (
            self._read_earlier(text)
            or self._read_decision(text)
            or self._read_charges_first(text, start)
            or self._read_conviction(text, start)
            or self._read_penalty(text)
            or self._read_accessory(text)
            or self._read_subject(text, start)
        )
        if not understood:
            if DANGER.search(NEUTRAL.sub("", text)):
                raise NotSaid("a clause that is not understood", text)
            self._leave_person(text)

    def _read_earlier(self, text: str) -> bool:
        """Read a clause on an earlier sentence: 撤销缓刑, 与前罪并罚; else return False."""
        if not EARLIER.fullmatch(text):
            return False
        for person in self._current:
            person.has_earlier_sentence = True
        if not self._current:  # 撤销…对被告人张某宣告缓刑的部分, before the judgment itself
            self._earlier_sentence_of_anybody = True
        return True

    def _read_decision(self, text: str) -> bool:
        """Read the penalty for all crimes of a person: 决定执行有期徒刑五年; else return False."""
        found = DECIDED.fullmatch(text)
        if not found:
            return False
        [person] = self._one_person(text)
        joined = AND_ACCESSORY.fullmatch(found["penalty"])
        written = joined[1] if joined else found["penalty"]
        fine = FINE.fullmatch(written)
        penalty = sentence() if fine else penalty_of(written)  # 决定执行罚金: no term
        if penalty is None:
            raise NotSaid("a penalty that cannot be read", text)
        # A fine from here on, as in 决定执行有期徒刑五年,并处罚金三万元, includes those before it.
        person.fines_before_decision = len(person.fines)
        person.decided.append(penalty)
        if fine:
            self._add_fine(fine["amount"], text)
        if joined and not self._read_accessory(joined[2]):
            raise NotSaid("a clause that is not understood", text)
        return True

    def _read_charges_first(self, text: str, start: int) -> bool:
        """Read 以盗窃罪判处被告人张某拘役三个月 or 对被告人张某以盗窃罪判处拘役三个月.

        In the pattern, the group `name_after` is the name after the charge, and `name_before` the
        name before it. Without a name, the clause is about the current person. Return False for
        another clause.
        """
        found = CONVICTED_BEFORE_NAME.fullmatch(text)
        if not found:
            return False
        charges = charges_in(found["charges"])
        if charges is None:
            raise NotSaid("an unknown charge", found["charges"])
        name = "name_after" if found["name_after"] else "name_before"
        if found[name]:
            self._current = self._named(start + found.start(name), start + found.end(name))
        for person in self._one_person(text):  # exactly one, or else an error
            self._add_charges(person, charges)
        self._add_penalty(found["penalty"], text)
        return True

    def _read_conviction(self, text: str, start: int) -> bool:
        """Read 张某犯盗窃罪, and a penalty that follows without a comma; else return False."""
        found = CONVICTED.fullmatch(text)
        if not found:
            return False
        rest = found["rest"]
        ends = [place + 1 for place, sign in enumerate(rest) if sign == "罪"]
        charges = None
        for end in reversed(ends):  # the longest beginning that can be read as crimes
            charges = charges_in(rest[:end])
            if charges:
                break
        if not charges:
            raise NotSaid("an unknown charge", rest[: ends[-1]])
        names = found["names"]
        if names and names not in ("该被告人", "被告人"):
            self._current = self._named(start, start + found.end("names"))
        if not self._current:
            raise NotSaid("a crime without a person", text)
        if "分别" in found["how"] and len(self._current) > 1 and len(charges) > 1:
            # 张某、李某分别犯盗窃罪、诈骗罪: each may have one of them
            raise NotSaid("crimes of several persons together", text)
        for person in self._current:
            self._add_charges(person, charges)
        # 犯盗窃罪一罪判处…, 犯盗窃罪未遂的判处…: these words change nothing
        after = re.sub("^(?:一罪|未遂|既遂|中止|预备)?(?:的)?", "", rest[end:])
        if after and not self._read_penalty(after):
            raise NotSaid("a clause that is not understood", text)
        return True

    def _read_penalty(self, text: str) -> bool:
        """Read a clause that is a penalty, with or without 判处; else return False."""
        needs_no_verb = EXEMPT.fullmatch(text) or text.startswith("单处罚金")  # 免予刑事处罚
        is_waiting = len(self._current) == 1 and self._current[0].is_waiting()
        of_named = OF_THE_NAMED.fullmatch(text)
        if found := SENTENCED.fullmatch(text):  # 判处有期徒刑三年, or with `each` 各判处拘役三个月
            self._add_penalty(found["penalty"], text, found["each"] or "")
        elif needs_no_verb or (is_waiting and penalty_of(text)):  # 张某犯盗窃罪，有期徒刑三年
            self._add_penalty(text, text)
        elif of_named and of_named["name"] in self._persons:  # 对张某处拘役三个月
            self._current = [self._persons[of_named["name"]]]
            self._add_penalty(of_named["penalty"], text)
        else:
            return False
        return True

    def _add_penalty(self, written: str, text: str, each: str = "") -> None:
        """Add a penalty to the last crime of each current person; `text` is the whole clause.

        - `written` may have an accessory clause, which is read apart: 三年有期徒刑并处罚金二千元.
        - It may begin with a name, as in 判处被告人张某拘役三个月. Then 张某 is the current person.
        - If `each` is 均 or 各, several persons get it. If it is 分别, one person may get several
          penalties, one for each crime: 有期徒刑三年、二年.
        """
        if joined := AND_ACCESSORY.fullmatch(written):
            self._add_penalty(joined[1], text, each)
            if not self._read_accessory(joined[2]):
                raise NotSaid("a clause that is not understood", text)
            return
        fine = FINE.fullmatch(written)
        penalty = sentence() if fine else penalty_of(written)  # a fine alone: no term
        if penalty is None and (named := OF_NAMED.fullmatch(written)):
            name = re.sub(f"^{TITLE}", "", named["name"])
            if name in self._persons:
                self._current = [self._persons[name]]
                self._add_penalty(named["penalty"], text)  # one person, so 均 or 分别 do not count
                return
        if penalty is None and each == "分别" and len(self._current) == 1:
            several = _several_penalties(written)
            if several:
                # Which crime has which penalty does not matter, nor that the last crime stays
                # without one: a person with several needs a decision, and only this counts.
                [person] = self._current
                charges = person.last_crime().charges
                person.crimes += [_Crime(charges, one) for one in several]
                return
        if penalty is None:
            raise NotSaid("a penalty that cannot be read", text)
        if not self._current or (len(self._current) > 1 and each not in ("均", "各")):
            raise NotSaid("a penalty without one person", text)
        for person in self._current:
            last = person.last_crime()
            if last.penalty is None:
                last.penalty = penalty
            elif not fine:
                raise NotSaid("two penalties of one crime", text)
        if fine:
            self._add_fine(fine["amount"], text)

    def _read_accessory(self, text: str) -> bool:
        """Read an accessory clause, and its fine if there is one; else return False."""
        if not ACCESSORY.fullmatch(text):
            return False
        refers_to_term = OF_TIME.match(text)  # 刑期自…起, 缓刑…: it may repeat 有期徒刑
        if PRINCIPAL.search(text) and not refers_to_term:
            return False  # 没收违法所得并判处有期徒刑一年 has a term of its own
        if text.startswith(("均", "各")) and len(self._persons) > len(self._current):
            raise NotSaid("accessory penalties of several persons together", text)
        if fine := re.fullmatch("(?:并处?|附加|另|各|均|分别|且|单处|处|合计|共)*罚金(.*)", text):
            self._add_fine(fine[1], text)
        return True

    def _read_subject(self, text: str, start: int) -> bool:
        """Make 张某 the current person after 被告人张某的行为; return False for another clause.

        This is what remains of 被告人张某的行为触犯《刑法》第264条 without the citation.
        """
        found = SUBJECT.fullmatch(text)
        if found:
            self._current = self._named(start, start + found.end("names"))
        return found is not None

    def _add_fine(self, amount: str, text: str) -> None:
        """Add a fine to the current persons; `amount` is what follows 罚金 in the clause.

        二千元 is a sum. Without any text the fine has no sum: None. Other texts add no fine, such
        as 于十日内缴纳 (when to pay). 二千 without 元 may be a sum, and is refused.
        """
        money = money_of(amount)
        if money is None and amount:
            is_number = NUMERAL.search(amount) and "元" not in amount
            if is_number and not re.search("日|内|月", amount):
                raise NotSaid("a fine that cannot be read", text)
            return
        for person in self._current:
            person.fines.append(money)

    def _add_charges(self, person: _Convict, charges: Sequence[str]) -> None:
        """Add crimes to the last ones if these have no penalty yet, or else as new ones."""
        if not person.is_waiting():
            person.crimes.append(_Crime())
        person.crimes[-1].charges.update(dict.fromkeys(charges))

    def _one_person(self, text: str) -> list[_Convict]:
        """Return the current persons, who must be one; errors quote the clause `text`."""
        if len(self._current) != 1:
            raise NotSaid("a penalty without one person", text)
        return self._current

    def _named(self, start: int, end: int) -> list[_Convict]:
        """Return the persons whom a part of the text names."""
        persons = []
        for first, last in _names(self._plain.text, start, end):
            name = self._plain.text[first:last]
            shown = self._plain.as_given(first, last)
            person = self._persons.setdefault(name, _Convict(shown, first))
            if self._earlier_sentence_of_anybody:
                person.has_earlier_sentence = True
            persons.append(person)
        return persons

    def _leave_person(self, text: str) -> None:
        """Make nobody the current person after a clause about somebody else: 李某系从犯.

        If a penalty without a name follows, it may be that of 李某. Without a current person,
        `_add_penalty` refuses it.
        """
        titled = re.match(TITLE, text)
        rest = text[titled.end() :] if titled else text
        if any(rest.startswith(person.name) for person in self._current):
            return
        begins_with_name = any(map(rest.startswith, self._persons))
        if titled or begins_with_name or OF_A_ROLE.match(rest):
            self._current = []


def _several_penalties(written: str) -> list[dict[str, Any]]:
    """Return the penalties in a list such as 有期徒刑三年、二年; empty if it is none."""
    [kind] = re.findall("^(?:有期徒刑|拘役|管制)?", written)  # may be empty
    penalties = []
    for part in re.split("[、和]", written):
        penalty = penalty_of(part) or penalty_of(kind + part)
        if penalty is None:
            return []
        penalties.append(penalty)
    return penalties


NO_NAME = re.compile(
    r"[犯罪判处刑]|指控|认定|辩称|行为|公诉|检察|法院|上述|本案|共同|伙同|等人|被告|上诉|可能|涉嫌|如果|是否|应当|应该|没有|否认|怀疑|[0-9]年|以上|以下|规定|事实"
    r"|^(?:其|该|被告人?|两人|二人|三人|各|均)|[因曾又还均也并应将会可不未若如]$|对|被害"
)
LONGEST_NAME = 40


def _names(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return the places of the names in a part of a text: 张某 and 李某 in 被告人张某、李某.

    Numbers of persons (等三人, 二名被告人) and 均 are no part of a name. 和 is between two names if
    a title follows it (张三和被告人李四), or both have 某 (张某和李某). 张三和李四 is an error: 和
    may be part of a name.
    """
    places = []
    for part in re.finditer("[^、]+", text[start:end]):
        written = re.sub("(?:等)?[二三四五六七八九十0-9]+(?:名被告人|人)$|均$", "", part[0])
        title = re.match(f"(?:和|与|及|以及)?{TITLE}+", written)
        first = start + part.start() + (title.end() if title else 0)
        last = start + part.start() + len(written)
        name = text[first:last]
        pair = re.fullmatch(f"(.{{2,}}?)(?:和|与|及|以及)({TITLE}?)(.{{2,}})", name)
        are_two = pair and (pair[2] or ("某" in pair[1] and "某" in pair[3]))
        if pair and are_two:
            places += [(first, first + len(pair[1])), (last - len(pair[3]), last)]
            continue
        if pair or not name or len(name) > LONGEST_NAME or NO_NAME.search(name):
            raise NotSaid("a name that is not certain", name or text[start:end])
        places.append((first, last))
    if not places:
        raise NotSaid("a name that is not certain", text[start:end])
    return places
