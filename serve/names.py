"""Facts of a case -> the names of its defendants, for cases without a list of them."""

import re

MAX_DEFENDANTS = 200  # more than any case has

MAX_NAMES_READ = 1000
"""Limit on names that are read, since each needs several searches of the whole text."""

MAX_SEEN = 100  # places of a name that are looked at

ALIKE = str.maketrans(
    "•・･‧∙（）：xXｘＸ*＊○〇◯ＡＢＣＤＥＦＧＨＩＪＫＬＭＮＯＰＱＲＳＴＵＶＷＹＺ０１２３４５６７８９",
    "·····():×××××××××ABCDEFGHIJKLMNOPQRSTUVWYZ0123456789",
)
"""Characters that mean the same in a name. Each becomes one other, so that places stay the same."""

INTRODUCED = re.compile(r"(?:被告(?:人|单位)?(?![席辩])|犯罪嫌疑人)[:\s]*")
"""Words before a defendant's name."""

SEPARATOR = re.compile(r"\s*(?:、|，?被告人[:\s]*|和|以?及)\s*")
"""Separators between the names of a list."""

NOTE = re.compile(r"\([^()]{0,40}\)")
"""Brackets after a name: another name, or a note that the person is tried separately."""

TRIED_ELSEWHERE = re.compile(
    r"另[案行处作]|分案|逃|[已巳]被?[判决处诉]|判[刑决]|起诉|死亡|身份|未[到归]案"
)
"""Notes on a person who is not a defendant of this case."""

NUMBERS = "两二三四五六七八九十"
NUMBER = re.compile(rf"([{NUMBERS}])人")

HAN = "\u4e00-\u9fff"
STEM = "[甲乙丙丁戊己庚辛壬癸]|[A-Z](?![A-Z])|[0-9]{1,2}(?![0-9.．人年月日时万元余多])"
ANONYMIZED = re.compile(rf"(?![将在对把被由])[{HAN}]{{1,2}}[某×]+(?:{STEM}|\((?:{STEM})\))?")
"""An anonymized name: 张某甲, 吴某A, 欧阳某某, 李○○, 王某(乙)."""

PLAIN = re.compile(rf"[{HAN}]{{2}}")
SURNAME_ONLY = re.compile(rf"[{HAN}]{{1,2}}?[某×]")
"""An anonymized name that a character of the given name may follow: 陶某军."""

DOTTED = re.compile(rf"[^\W某告]{{1,8}}[某×]{{0,2}}·[{HAN}×]")
"""A name with dots, up to the first character after the dot: 玉素甫·买."""

LONGEST_REST = 15  # of a name with dots, in characters

FOLLOWING = (
    "在于因将为伙与和及以用持从到至驾等又再已被经对向系犯趁非酒无窜先后多上述均等的是有携乘得见"
    "欲指纠邀组发通参进拿打冲随商预积共同明知醉提供不主自归供当采未交通过分别实施利乘伪虚曾亦也"
    "位身认窃给送处所租账吸作担转帮听结合家负抓收购联人一来便接使办带贩现血要让受遂予还按开退支借"
    "谎承涉出电找手隐获住个介盗取逃应签约冒赔继骗三即雇诈告协居仍二去各违每控并没回拒之离饮两骑挪"
    "独制则推事说时看授请加行了投叫返相坐挂赶四微化望搞准汇拨私名毒殴案传卖召求具停决追入寻擅尾答"
    "原注步催编报除右左运能欠抢改银只劝跟调砍藏累沿索变偿怀假工另喝阻申六暂串或夺滥配既更查产逼领"
    "免陪统确做侵重"
)
"""Characters that often follow a name and are seldom part of one."""

END = re.compile(f"[{FOLLOWING}]|陆续|[^{HAN}]|$")
END_OF_DOTTED = re.compile(
    rf"(?![明提不于多来加合则得])[{FOLLOWING}]|[^{HAN}·×]|$|于(?![素苏])"
    r"|[明得]知|提[供出议取]|不[服顾满听]|多次|来到|加[入盖]|合[伙谋]"
)
"""What follows a name; 买买提明 and 于素甫 are parts of names."""

LISTED = re.compile(rf"(?![等后时处均家])[{HAN}][、，。(]")
"""The last character of a name in a list, whatever else it means."""

SURNAMES = frozenset(
    "王李张刘陈杨黄赵吴周徐孙马朱胡郭何高林罗郑梁谢宋唐许韩冯邓曹彭曾肖田董袁潘于蒋蔡余杜叶程苏魏吕丁任"
    "沈姚卢姜崔钟谭陆汪范金石廖贾夏韦付方白邹孟熊秦邱江尹薛闫段雷侯龙史陶黎贺顾毛郝龚邵万钱严覃武戴莫"
    "孔向汤温康施文牛樊葛邢安齐易乔伍庞颜倪庄聂章鲁岳翟殷詹申欧耿关兰焦俞左柳甘祝包宁尚符舒阮柯纪梅童"
    "凌毕单季裴霍涂成苗谷盛曲翁冉骆蓝路游辛靳欧阳管柴蒙鲍华喻祁蒲房滕屈饶解牟艾尤阳时穆农司卓古吉缪简"
    "车项连芦麦褚娄窦戚岑景党宫费卜冷晏席卫米柏宗瞿桂全佟应臧闵苟邬边卞姬师和仇栾隋商刁沙荣巫寇桑郎甄"
    "丛仲虞敖巩明佘池查麻苑迟邝官封谈匡鞠惠荆乐冀郁胥南班储原栗燕楚鄢劳谌奚皮粟冼蔺楼盘满闻位厉伊仝区"
    "郜海阚花权强帅屠豆朴盖练廉禹井祖漆巴丰支卿国狄平计索宣晋相初门云容敬来扈晁芮都普阙浦戈伏鹿薄邸雍"
    "辜羊阿乌母裘亓修邰赫杭况那宿鲜印逯隆茹诺战慕危玉银亢嵇公哈湛宾戎勾茅利於呼居揭干但尉冶斯元束檀衣"
    "信展阴昝智幸奉植衡富尧闭由"
)
"""The first characters of about five hundred surnames, including two-character ones like 欧阳."""


def find_defendants(fact: str) -> list[str]:
    """Return the names of the defendants in order of appearance.

    The rules make mistakes, so let the user check the names. A name follows `被告人`, alone or in a
    list; its end is found from its other occurrences and from characters that usually follow names.
    On the 285 real dev cases precision and recall are 94%.
    """
    text = fact.translate(ALIKE)
    listed: dict[str, None] = {}
    elsewhere: set[str] = set()
    read_to = names_read = 0
    for introduced in INTRODUCED.finditer(text):
        if len(listed) >= MAX_DEFENDANTS or names_read >= MAX_NAMES_READ:
            break
        if introduced.end() < read_to:  # inside the last list
            continue
        names, others, read_to = _list_at(text, introduced.end())
        names_read += len(names)
        listed |= dict.fromkeys(names)
        elsewhere.update(others)
    places = {name: text.find(name) for name in listed.keys() - elsewhere}
    names = sorted(places, key=lambda name: (places[name], name))
    return [fact[places[name] :][: len(name)] for name in names]


def _list_at(text: str, start: int) -> tuple[list[str], list[str], int]:
    """Return the names of the list at `start`, those tried elsewhere, and the end of the list."""
    names: list[str] = []
    elsewhere: list[str] = []
    noted = 0  # names up to the last note
    while len(names) < MAX_DEFENDANTS and (name := _name_at(text, start)):
        names.append(name)
        start += len(name)
        if note := NOTE.match(text, start):
            start = note.end()
            if TRIED_ELSEWHERE.search(note[0]):
                elsewhere += _meant(names[noted:], note[0])
            noted = len(names)
        separator = SEPARATOR.match(text, start)
        if not separator:
            break
        start = separator.end()
    return names, elsewhere, start


def _meant(names: list[str], note: str) -> list[str]:
    """Return which of the names since the last note a note is about: 后三人均另案处理."""
    if number := NUMBER.search(note):
        return names[-max(2, 1 + NUMBERS.index(number[1])) :]
    return names if "均" in note or "等" in note else names[-1:]


def _name_at(text: str, start: int) -> str | None:
    """Return the name at `start`, if any."""
    if dotted := DOTTED.match(text, start):
        return _dotted_name(text, dotted)
    if anonymized := ANONYMIZED.match(text, start):
        is_open = SURNAME_ONLY.fullmatch(anonymized[0])
        return _longer_name(text, anonymized) if is_open else anonymized[0]
    plain = PLAIN.match(text, start)
    return _longer_name(text, plain) if plain and text[start] in SURNAMES else None


def _dotted_name(text: str, found: re.Match[str]) -> str:
    """Return the whole name: a character belongs to it that mostly follows what is before it."""
    name = found[0]
    for end in range(found.end(), found.end() + LONGEST_REST):
        followed_by = _followed_by(text, name)
        if END_OF_DOTTED.match(text, end) or followed_by.count(text[end]) < 0.7 * len(followed_by):
            break
        name += text[end]
    return name


def _longer_name(text: str, found: re.Match[str]) -> str:
    """Return 陶某军 for 陶某, or 王建国 for 王建, if one more character belongs to the name."""
    name, end = found[0], found.end()
    longer = name + text[end : end + 1]
    if LISTED.match(text, end):
        return longer
    if END.match(text, end):
        return name
    followed_by = _followed_by(text, name)
    alone = sum(1 for character in followed_by if END.match(character))
    seen = followed_by.count(text[end])
    belongs = seen > alone and (seen > 1 or END.match(text, end + 1))
    return longer if belongs else name


def _followed_by(text: str, name: str) -> list[str]:
    """Return the character after a name, "" for none, at each of its first places."""
    return [rest[:1] for rest in text.split(name, MAX_SEEN)[1:]]
