"""Copies that people and tools have altered are found in every script, and texts of their own are not."""

import itertools
import re
import unicodedata
from typing import Literal

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from data_prep import word_runs
from data_prep.duplicates import signature
from data_prep.word_runs import hash_runs, index_of_runs, num_whole_texts, shares_a_run

NUM_WORDS = 13
# Script: a passage, an altered copy of it, and a text of its own on the same matter.
PASSAGES = {
    "Latin": (
        "The official finished the florist’s affidavit, re-read the final five lines and filed it in an oak chest.",
        "THE oﬃcial ﬁn\u00adished the\nﬂorist's aﬃdavit -- re\u2010read the ﬁnal ﬁve lines _and_ ﬁled it in\u00a0ａｎ",
        "The official lost the florist’s affidavit, then wrote the final five lines again and filed it at home.",
    ),
    "Latin with accents": (
        "Près du château, l’élève répétait où l’été dernier le maître avait égaré sa clé, là, sous la forêt gelée.",
        unicodedata.normalize("NFD", "PRÈS DU CHATEAU, L'ÉLÈVE répétait où l'été der\u00adnier le maitre avait égaré"),
        "Près du château, l’élève cherchait la clé que le maître avait égarée l’hiver dernier, là-bas, sous la neige.",
    ),
    "Latin with a dotless i": (
        "Irmağın kıyısında ışıklar sönünce ihtiyar balıkçı ıslak ağlarını ipe serip yıldız saymaya başladı.",
        # Capitals by the rule of Turkish, which were then made small by that of English.
        "IRMAĞIN KIYISINDA IŞIKLAR SÖNÜNCE İHTİYAR BALIKÇI ISLAK AĞLARINI İPE SERİP YILDIZ SAYMAYA BAŞLADI".lower(),
        "Irmağın kıyısında oturan ihtiyar balıkçı ıslak ağlarını onardı, sonra yıldızları sayan çocuklara ekmek verdi.",
    ),
    "Cyrillic": (
        "Весёлый почтальон ещё до зари развёз все письма по деревне, а потом долго пил чай у окна.",
        unicodedata.normalize(
            "NFD", "ВЕСЕЛЫЙ почтальон еще до за\u00adри развез все письма по деревне – а потом долго"
        ),
        "Весёлый почтальон до рассвета пил чай у окна, а письма по деревне ещё два дня развозила его дочь.",
    ),
    "Greek": (
        "Ο ψαράς κάθισε στον βράχο, μέτρησε τους αστερίες του και είπε πως ο άνεμος θα γυρίσει αύριο.",
        "Ο ΨΑΡΑΣ ΚΑΘΙΣΕ ΣΤΟΝ ΒΡΑΧΟ· ΜΕΤΡΗΣΕ ΤΟΥΣ ΑΣΤΕΡΙΕΣ ΤΟΥ\nΚΑΙ ΕΙΠΕ ΠΩΣ Ο ΑΝΕΜΟΣ ΘΑ ΓΥΡΙΣΕΙ ΑΥΡΙΟ",
        "Ο ψαράς είπε πως ο άνεμος γύρισε και πως τους αστερίες του θα τους μετρήσει αύριο, στον άλλο βράχο.",
    ),
    "Arabic": (
        "خَرَجَ الصَّيَّادُ قَبْلَ الفَجْرِ إِلَى البَحْرِ، وَحَمَلَ شَبَكَتَهُ القَدِيمَةَ، ثُمَّ عَادَ مَسَاءً بِسَلَّةٍ مَلِيئَةٍ بِالسَّمَكِ الفِضِّيِّ.",
        "خرج الصيـــاد قبل الفجر الى البحر وحمل\nشبكته القديمة. ثم عاد مساء بسلة مليئة بالسمك",
        "عَادَ الصَّيَّادُ قَبْلَ المَسَاءِ مِنَ البَحْرِ بِسَلَّةٍ فَارِغَةٍ، ثُمَّ جَلَسَ يُصْلِحُ شَبَكَتَهُ القَدِيمَةَ حَتَّى الفَجْرِ.",
    ),
    "Hebrew": (
        "הַסַּבָּא יָשַׁב לְיַד הַחַלּוֹן וְסִפֵּר לַיְלָדִים עַל אֳנִיָּה קְטַנָּה שֶׁחָצְתָה אֶת הַיָּם בְּלִי מַפָּה וּבְלִי רוּחַ.",
        "הסבא ישב ליד החלון, וספר לילדים על אניה קטנה\u200f שחצתה את־הים בלי מפה – ובלי רוח",
        "הַיְלָדִים יָשְׁבוּ לְיַד הַחַלּוֹן וְצִיְּרוּ אֳנִיָּה קְטַנָּה, וְהַסַּבָּא סִפֵּר לָהֶם עַל הַיָּם וְעַל הָרוּחַ.",
    ),
    "Devanagari": (
        "बूढ़ा कुम्हार रोज़ सुबह नदी के किनारे से मिट्टी लाता था और शाम तक सौ छोटे दीये बना लेता था।",
        "बू\u095dा कुम्\u200dहार रोज सुबह नदी के\nकिनारे से मिट्\u200cटी लाता था, और शाम तक सौ छोटे दीये बना लेता था",
        "बूढ़ा कुम्हार शाम तक नदी के किनारे बैठा रहा और रोज़ की तरह सौ छोटे दीये गिनता रहा, मिट्टी कम थी।",
    ),
    "Chinese": (
        "磨坊旁边住着一位修伞的老人，每逢下雨他就把屋檐下的竹凳让给过路的行人，自己站着听雨。",
        "磨坊旁边住着⼀位修伞的\uf934⼈ 每逢下⾬他就把\n屋檐下的竹凳让给过路的行\u200b人　自己站着听雨",
        "磨坊旁边的老人不修伞了，下雨的时候他把竹凳搬到屋檐下，听过路的行人讲山那边的事情，雨停才走。",
    ),
    "Japanese": (
        "図書館のガラス窓から港のクレーンが見えて、パンダの絵本を読む子どもたちは時計台のベルを待っていた。",
        "図書館のｶﾞﾗｽ窓から\n港のｸﾚｰﾝが見えて　ﾊﾟﾝﾀﾞの絵本を読む"
        + unicodedata.normalize("NFD", "子どもたちは時計台のベルを待っていた"),
        "図書館の時計台からはクレーンが見えない。子どもたちはガラス窓のそばでパンダの絵本を読み、ベルの音を数えた。",
    ),
    "Thai": (
        "คุณยายปลูกต้นมะม่วงไว้หลังบ้าน พอถึงหน้าร้อนเด็กๆ ก็มานั่งนับลูกมะม่วงที่ร่วงลงมาทุกเช้า แล้วนำไปทำขนม",
        "คุณยายปลูกต้น\u200bมะม่วงไว้\u200bหลังบ้านพอถึงหน้าร้อนเด็กๆก็มานั่ง\nนับลูกมะม่วงที่ร่วงลงมาทุกเช้าแล้วน\u0e4d\u0e32ไปท\u0e4d\u0e32ขนม",
        "คุณยายทำขนมมะม่วงไว้ที่หลังบ้าน เด็กๆ มานั่งรอทุกเช้า พอถึงหน้าฝนต้นมะม่วงก็ไม่มีลูกให้นับ แล้วทุกคนก็กลับบ้าน",
    ),
    "Korean": (
        "그날 할머니는 마당에 널어 둔 고추를 걷으며 내일은 비가 올 것 같다고 이웃집 아이에게 말했다.",
        unicodedata.normalize("NFD", "그날 할머니는 마당에 널어 둔 고추를\n걷으며, 내일은 비가 올 것 같다고 ‘이웃집’"),
        "할머니는 이웃집 아이에게 마당의 고추를 맡기고, 내일은 비가 올 것 같으니 아침에 걷어 달라고 조용히 말했다.",
    ),
    "Georgian": (
        "მოხუცი მეთევზე ყოველ დილით ადრე დგებოდა, ნავს ზღვაში უშვებდა და საღამომდე სახლში არ ბრუნდებოდა.",
        "მოხუცი მეთევზე ყოველ დილით ად\u00adრე დგებოდა — ნავს ზღვაში უშვებდა და საღამომდე სახლში არ".upper(),
        "მოხუცი მეთევზე საღამომდე სახლში იჯდა, რადგან ზღვა ღელავდა და ნავს წყალში არ უშვებდა.",
    ),
    "Ethiopic": (
        "ልጁ መጽሐፉን ይዞ ወደ ትምህርት ቤት ሄደ። እናቱ ግን በር ላይ ቆማ እስኪመለስ ድረስ ጠበቀችው።",
        "ልጁ፡መጽሐፉን፡ይዞ፡ወደ፡ትምህርት፡ቤት፡ሄደ፡፡ እናቱ፡ግን፡በር፡ላይ፡ቆማ፡እስኪመለስ",
        "እናቱ መጽሐፉን ይዛ ወደ ትምህርት ቤት ሄደች። ልጁ ግን በር ላይ ቆሞ እስክትመለስ ድረስ ጠበቃት።",
    ),
}
WORDS = ["Straße", *(word for passages in PASSAGES.values() for word in passages[0].split())]
SEPARATORS = (" ", "\n", ", ", " \u200b", "\u3000", " – ", " (\ufeff", "\t\u2060")
Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
FORMS: tuple[Form, ...] = ("NFC", "NFD", "NFKC", "NFKD")


def reference_words(text: str) -> list[tuple[str, int]]:
    """Words of the text as they are compared, each with the sixths of a word that it counts for."""
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold().replace("ı", "i"))
    text = regex.sub(r"(?V1)[\p{DI}\u0640[\p{Mn}&&[\p{Diacritic}\p{sc=Zinh}\p{sc=Arab}\p{sc=Hebr}]]]", "", text)
    half, third = r"[\p{lb=ID}\p{lb=CJ}\p{lb=NS}]", r"[\p{lb=SA}\p{lb=AK}\p{lb=AS}]"
    letter = r"[\p{L}\p{N}]"
    joined = rf"[{letter}--{half}--{third}]"
    words = regex.finditer(
        rf"(?V1)([{letter}&&{half}]\p{{M}}*)|([{letter}&&{third}]\p{{M}}*)|({joined}[{joined}\p{{M}}]*)", text
    )
    return [(word.group(), (3, 2, 6)[word.lastindex - 1]) for word in words]


def reference_runs(text: str, num_words: int) -> list[tuple[str, ...]]:
    words = reference_words(text)
    if 0 < sum(size for _, size in words) < 6 * num_words:
        return [("whole", *(word for word, _ in words))]
    runs = []
    for first in range(len(words)):
        sizes = list(itertools.accumulate(size for _, size in words[first:]))
        if sizes[-1] >= 6 * num_words:
            length = next(place for place, size in enumerate(sizes, 1) if size >= 6 * num_words)
            runs.append(tuple(word for word, _ in words[first : first + length]))
    return runs


@pytest.mark.parametrize("script", PASSAGES)
def test_an_altered_copy_is_found_and_a_text_of_its_own_is_not(script: str) -> None:
    passage, copy, own = PASSAGES[script]
    index = index_of_runs([passage], NUM_WORDS)
    assert num_whole_texts(index) == 0
    assert shares_a_run(f"{own} {copy} {own}", NUM_WORDS, index)
    assert not shares_a_run(own, NUM_WORDS, index)


@pytest.mark.parametrize(("script", "num_letters"), [("Chinese", 26), ("Japanese", 26), ("Thai", 39)])
def test_letters_of_scripts_without_spaces_are_parts_of_words(script: str, num_letters: int) -> None:
    passage, _, own = PASSAGES[script]
    letters = [word for word, _ in reference_words(passage)]
    index = index_of_runs([passage], NUM_WORDS)
    assert shares_a_run(own + "".join(letters[2 : 2 + num_letters]), NUM_WORDS, index)
    assert not shares_a_run(own + "".join(letters[2 : 1 + num_letters]), NUM_WORDS, index)


def test_a_run_holds_words_of_several_scripts() -> None:
    passage = "In 2019 schrieb 李白 zwölf Briefe an ยาย und den Лев aus Tōkyō"
    assert len(hash_runs(passage, 12)) == 2
    assert shares_a_run(passage.upper().replace("李白", "李 白"), 12, index_of_runs([passage], 12))


@pytest.mark.parametrize(
    ("short", "same", "other"),
    [
        ("The answer is: forty-two", "the answer is FORTY TWO!", "The answer is: forty-three"),
        ("Ναι, ίσως", "ΝΑΙ ΙΣΩΣ", "Ναι"),
        ("答案是四十二", "答案是 四十二。", "答案是四十三"),
        ("ใช่", "ใช่!", "ไม่ใช่"),
    ],
)
def test_short_texts_are_found_whole_and_not_in_longer_ones(short: str, same: str, other: str) -> None:
    index = index_of_runs([short], NUM_WORDS)
    assert len(index) == num_whole_texts(index) == 1
    assert shares_a_run(same, NUM_WORDS, index)
    assert not shares_a_run(other, NUM_WORDS, index)
    assert not shares_a_run(f"{short} {PASSAGES['Latin'][0]}", NUM_WORDS, index)
    assert not shares_a_run(f"{short} {other}", NUM_WORDS, index)


def test_a_hash_of_a_whole_text_is_never_one_of_a_run() -> None:
    # Words of equal numbers, so that only what the hash stands for tells them apart.
    assert not set(hash_runs("one two three", 4).tolist()) & set(hash_runs("one two three", 3).tolist())
    assert num_whole_texts(index_of_runs(WORDS, 1)) == num_whole_texts(index_of_runs([" ".join(WORDS)], 3)) == 0


@pytest.mark.parametrize("text", ["", "!!!", "\u0301\u00ad", " \n", "🙂🙂", "\u064b\u0640", "\ud800"])
def test_a_text_without_a_word_has_no_hash(text: str) -> None:
    assert len(hash_runs(text, 1)) == len(index_of_runs([text], 1)) == 0
    assert not shares_a_run(text, 1, index_of_runs(["one"], 1))
    assert not shares_a_run("one", 1, index_of_runs([text], 1))


def test_near_duplicates_are_compared_by_the_same_words() -> None:
    for passage, _, own in PASSAGES.values():
        decomposed = unicodedata.normalize("NFD", passage).upper()
        assert (signature(decomposed) == signature(passage)).all()
        assert np.mean(signature(own) == signature(passage)) < 0.5
    short, spaced, other, rest = map(signature, ("早安", "早 安!", "晚安", "???"))
    assert (short == spaced).all()
    assert not (short == other).any()
    assert not (signature("!!!") == rest).any()


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=40), st.data())
def test_form_case_separators_and_invisible_characters_do_not_matter(words: list[str], data: st.DataObject) -> None:
    expected = hash_runs(" ".join(words), 5)
    case = data.draw(st.sampled_from([str.upper, str.lower, str.title, str.swapcase, str.casefold]))
    separators = data.draw(st.lists(st.sampled_from(SEPARATORS), min_size=len(words), max_size=len(words)))
    copy = case("".join(word + separator for word, separator in zip(words, separators, strict=True)))
    copy = unicodedata.normalize(data.draw(st.sampled_from(FORMS)), copy)
    place = data.draw(st.integers(0, len(copy)))
    copy = copy[:place] + data.draw(st.sampled_from("\u00ad\u200b\u200d\ufeff\ufe0f")) + copy[place:]
    assert hash_runs(copy, 5).tolist() == expected.tolist()


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(FORMS))
def test_all_forms_of_any_text_are_equal(text: str, form: Form) -> None:
    assert hash_runs(unicodedata.normalize(form, text), 1).tolist() == hash_runs(text, 1).tolist()


@given(st.lists(st.text("aB’é\u0301 字か\u3099ｶﾞ กิ่ำ1½_-ا\u064bᄀ각ְ\u200d", max_size=12), min_size=2, max_size=6))
def test_hashes_are_equal_exactly_where_the_slow_reference_says_so(texts: list[str]) -> None:
    for num_words in (1, 2, 3):
        runs = [run for text in texts for run in reference_runs(text, num_words)]
        hashes = [value for text in texts for value in hash_runs(text, num_words).tolist()]
        assert len(set(zip(runs, hashes, strict=True))) == len(set(runs)) == len(set(hashes))


def test_long_texts_are_read_by_parts_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(itertools.chain(*PASSAGES.values())) * 20
    assert len(text) > word_runs._PART_CHARACTERS // 2
    whole = hash_runs(text, NUM_WORDS)
    for characters in (1, 50, 1000):
        monkeypatch.setattr(word_runs, "_PARTS", re.compile(rf"(?s).{{1,{characters}}}\S*"))
        assert hash_runs(text, NUM_WORDS).tolist() == whole.tolist()
    unbroken = PASSAGES["Chinese"][0] * (word_runs._PART_CHARACTERS // 20)
    assert set(hash_runs(unbroken, NUM_WORDS).tolist()) == set(
        hash_runs(PASSAGES["Chinese"][0] * 3, NUM_WORDS).tolist()
    )
