"""The articles that amendments have inserted into the Criminal Law (133.1), by their charges.

A file with whole numbers has 133 for them, which is the article of another crime.
"""

from collections.abc import Sequence

TABLE = """
    120 组织、领导、参加恐怖组织罪 120.1 帮助恐怖活动罪 资助恐怖活动罪 120.2 准备实施恐怖活动罪
    120.3 宣扬恐怖主义、极端主义、煽动实施恐怖活动罪 120.4 利用极端主义破坏法律实施罪
    120.5 强制穿戴宣扬恐怖主义、极端主义服饰、标志罪 120.6 非法持有宣扬恐怖主义、极端主义物品罪
    133 交通肇事罪 133.1 危险驾驶罪 133.2 妨害安全驾驶罪
    134 重大责任事故罪 强令违章冒险作业罪 强令、组织他人违章冒险作业罪 134.1 危险作业罪
    135 重大劳动安全事故罪 135.1 大型群众性活动重大安全事故罪
    139 消防责任事故罪 139.1 不报、谎报安全事故罪
    142 生产、销售劣药罪 生产、销售、提供劣药罪 142.1 妨害药品管理罪
    162 妨害清算罪 162.1 隐匿、故意销毁会计凭证、会计帐簿、财务会计报告罪 162.2 虚假破产罪
    169 徇私舞弊低价折股、出售国有资产罪 169.1 背信损害上市公司利益罪
    175 高利转贷罪 175.1 骗取贷款、票据承兑、金融票证罪
    177 伪造、变造金融票证罪 177.1 妨害信用卡管理罪 窃取、收买、非法提供信用卡信息罪
    185.1 背信运用受托财产罪 违法运用资金罪
    205 虚开增值税专用发票、用于骗取出口退税、抵扣税款发票罪 205.1 虚开发票罪
    210.1 持有伪造的发票罪
    219 侵犯商业秘密罪 219.1 为境外窃取、刺探、收买、非法提供商业秘密罪
    224 合同诈骗罪 224.1 组织、领导传销活动罪
    234 故意伤害罪 234.1 组织出卖人体器官罪
    236 强奸罪 236.1 负有照护职责人员性侵罪
    244 强迫劳动罪 244.1 雇用童工从事危重劳动罪
    253 私自开拆、隐匿、毁弃邮件、电报罪
    253.1 侵犯公民个人信息罪 出售、非法提供公民个人信息罪 非法获取公民个人信息罪
    260 虐待罪 260.1 虐待被监护、看护人罪
    262 拐骗儿童罪 262.1 组织残疾人、儿童乞讨罪 262.2 组织未成年人进行违反治安管理活动罪
    276 破坏生产经营罪 276.1 拒不支付劳动报酬罪
    280 伪造、变造、买卖国家机关公文、证件、印章罪 盗窃、抢夺、毁灭国家机关公文、证件、印章罪
    伪造公司、企业、事业单位、人民团体印章罪 伪造、变造居民身份证罪 伪造、变造、买卖身份证件罪
    280.1 使用虚假身份证件、盗用身份证件罪 280.2 冒名顶替罪
    284 非法使用窃听、窃照专用器材罪
    284.1 组织考试作弊罪 非法出售、提供试题、答案罪 代替考试罪
    286 破坏计算机信息系统罪 286.1 拒不履行信息网络安全管理义务罪
    287.1 非法利用信息网络罪 287.2 帮助信息网络犯罪活动罪
    291 聚众扰乱公共场所秩序、交通秩序罪
    291.1 投放虚假危险物质罪 编造、故意传播虚假恐怖信息罪 编造、故意传播虚假信息罪
    291.2 高空抛物罪
    293 寻衅滋事罪 293.1 催收非法债务罪
    299 侮辱国旗、国徽罪 侮辱国旗、国徽、国歌罪 299.1 侵害英雄烈士名誉、荣誉罪
    307 妨害作证罪 帮助毁灭、伪造证据罪 307.1 虚假诉讼罪
    308 打击报复证人罪 308.1 泄露不应公开的案件信息罪 披露、报道不应公开的案件信息罪
    334 非法采集、供应血液、制作、供应血液制品罪 采集、供应血液、制作、供应血液制品事故罪
    334.1 非法采集人类遗传资源、走私人类遗传资源材料罪
    336 非法行医罪 非法进行节育手术罪 336.1 非法植入基因编辑、克隆胚胎罪
    342 非法占用农用地罪 342.1 破坏自然保护地罪
    344 非法采伐、毁坏国家重点保护植物罪 危害国家重点保护植物罪
    非法收购、运输、加工、出售国家重点保护植物、国家重点保护植物制品罪
    344.1 非法引进、释放、丢弃外来入侵物种罪
    355 非法提供麻醉药品、精神药品罪 355.1 妨害兴奋剂管理罪
    388 受贿罪 388.1 利用影响力受贿罪 390 行贿罪 390.1 对有影响力的人行贿罪
    399 徇私枉法罪 民事、行政枉法裁判罪 执行判决、裁定失职罪 执行判决、裁定滥用职权罪
    399.1 枉法仲裁罪 408 环境监管失职罪 408.1 食品监管渎职罪 食品、药品监管渎职罪
"""
"""Each article, inserted or with the same number, and its charges, also by their older names.

Inserted by the amendments I (1999): 162.1; III (2001): 120.1, 291.1; IV (2002): 244.1; V (2005):
177.1; VI (2006): 135.1, 139.1, 162.2, 169.1, 175.1, 185.1, 262.1, 399.1; VII (2009): 224.1, 253.1,
262.2, 388.1; VIII (2011): 133.1, 205.1, 210.1, 234.1, 276.1, 408.1; IX (2015): 120.2-120.6, 260.1,
280.1, 284.1, 286.1, 287.1, 287.2, 307.1, 308.1, 390.1; XI (2020): the others.
"""


def _articles() -> dict[str, str]:
    articles = {}
    article = ""
    for word in TABLE.split():
        if word[0].isdecimal():
            article = word
        else:
            articles[word] = article
    return articles


ARTICLES = _articles()
"""Charge -> its article."""


def with_inserted(charges: Sequence[str], articles: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return articles with those inserted for the charges, and notes on charges without theirs.

    133 remains beside 133.1 only where it is the article of another charge.
    """
    of_charges = {charge: ARTICLES.get(charge.replace("账", "帐"), "") for charge in charges}
    inserted = {charge: article for charge, article in of_charges.items() if "." in article}
    result: list[str] = []
    for article in articles:
        here = [one for one in inserted.values() if one.split(".")[0] == article]
        if not here or article in of_charges.values():
            result.append(article)
        result += here
    notes = [
        f"{charge} is article {article}, not among the articles"
        for charge, article in inserted.items()
        if article not in result
    ]
    return list(dict.fromkeys(result)), notes
