r"""How many altered copies of evaluation texts are found in each script, how many other texts are taken for copies, and
how fast, beside words as `\w+` finds them in lower case.

All texts are invented: words are syllables drawn by chance from letters of the script, and few words make up most of a
text. Evaluation texts and others share stock phrases of up to eight words.
"""

import random
import re
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import regex
from numpy.typing import NDArray

from data_prep.word_runs import hash_runs, index_of_runs, shares_a_run
from tests.benchmarks.timing import median_seconds

NUM_WORDS = 13
NUM_COPIES = 200
NUM_OTHERS = 1000
_VOCABULARY = 3000
_PHRASES = 30
_COPIED_WORDS = (20, 30)
# Of scripts without spaces: words that are about as many letters as the run has words.
_FEWER_WORDS = {"Chinese": 7, "Japanese": 7, "Thai": 5}
_SPEED_DOCUMENTS, _DOCUMENT_CHARACTERS = 500, 3000
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Alter = Callable[[str, random.Random], str]


@dataclass(frozen=True)
class Script:
    """Letters to make words of: a syllable takes one of each line's, where `-` is none."""

    syllable: tuple[str, ...]
    num_syllables: tuple[int, ...]
    alterations: tuple[Alter, ...]
    space: str = " "


def run() -> list[str]:
    """Lines of the result: shares of copies found and of others taken for copies, and speeds."""
    title = f"{NUM_WORDS} words in a row, {NUM_COPIES} copies and {NUM_OTHERS:,} other texts a script"
    columns = ("", "found", "false", r"found by \w+", "false")
    lines = [f"decontamination: {title}", " {:12} {:>8} {:>7} {:>14} {:>7}".format(*columns)]
    found_whole, false_whole, fewer = [], [], []
    for name, script in SCRIPTS.items():
        made = _Set(script)
        index = index_of_runs(made.passages, NUM_WORDS)
        before = {value for text in made.passages for value in hash_plain_runs(text, NUM_WORDS).tolist()}
        shares = [
            np.mean([shares_a_run(text, NUM_WORDS, index) for text in made.copies]),
            np.mean([shares_a_run(text, NUM_WORDS, index) for text in made.others]),
            np.mean([not before.isdisjoint(hash_plain_runs(text, NUM_WORDS).tolist()) for text in made.copies]),
            np.mean([not before.isdisjoint(hash_plain_runs(text, NUM_WORDS).tolist()) for text in made.others]),
        ]
        lines.append(f" {name:12} {shares[0]:8.1%} {shares[1]:7.1%} {shares[2]:14.1%} {shares[3]:7.1%}")
        short = index_of_runs(made.answers, NUM_WORDS)
        found_whole += [shares_a_run(text, NUM_WORDS, short) for text in made.answer_copies]
        false_whole += [shares_a_run(text, NUM_WORDS, short) for text in made.answer_quotes]
        if num_words := _FEWER_WORDS.get(name):
            fewer_index = index_of_runs(made.passages, num_words)
            fewer.append(f"{name} {np.mean([shares_a_run(text, num_words, fewer_index) for text in made.others]):.1%}")
    return [
        *lines,
        f" false where 14 letters are a run, 15 in Thai: {', '.join(fewer)}",
        f" texts of 2 to 8 words: {np.mean(found_whole):.1%} of {len(found_whole):,} altered copies found, "
        f"{np.mean(false_whole):.1%} of {len(false_whole):,} longer texts that quote one taken for a copy",
        *_speeds(),
    ]


def _speeds() -> list[str]:
    lines = []
    for name, script in (("ASCII prose", SCRIPTS["Latin"]), ("Chinese", SCRIPTS["Chinese"])):
        rng = random.Random(1)
        writer = _Writer(script, rng, ascii_only=name == "ASCII prose")
        texts = [writer.text(1200)[:_DOCUMENT_CHARACTERS] for _ in range(_SPEED_DOCUMENTS)]
        num_bytes = sum(len(text.encode()) for text in texts)
        works = {
            "now": lambda texts=texts: [hash_runs(text, NUM_WORDS) for text in texts],
            r"\w+": lambda texts=texts: [hash_plain_runs(text, NUM_WORDS) for text in texts],
        }
        seconds = median_seconds(works)
        rates = ", ".join(f"{work} {num_bytes / 1e6 / taken:.0f} MB/s" for work, taken in seconds.items())
        lines.append(f" {name}, documents of {_DOCUMENT_CHARACTERS:,} characters: {rates}")
    return lines


def hash_plain_runs(text: str, num_words: int) -> NDArray[np.uint64]:
    r"""Hashes of runs of words that are `\w+` in lower case: what is compared without regard to scripts."""
    words = [zlib.crc32(word.encode()) for word in re.findall(r"\w+", text.lower())]
    num_runs = len(words) - num_words + 1
    if num_runs < 1:
        return np.empty(0, dtype=np.uint64)
    codes = _mix(np.array(words, dtype=np.uint64))
    runs = np.zeros(num_runs, dtype=np.uint64)
    for offset in range(num_words):
        runs = runs * _MULTIPLIER + codes[offset : offset + num_runs]
    return _mix(runs)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(31))) * _MULTIPLIER
    return values ^ (values >> np.uint64(29))


class _Writer:
    """Texts of one script, of a vocabulary and stock phrases of its own."""

    def __init__(self, script: Script, rng: random.Random, ascii_only: bool = False) -> None:
        self._script, self._rng = script, rng
        slots = [line.split() for line in script.syllable]
        if ascii_only:
            slots = [[letters for letters in slot if letters.isascii()] for slot in slots]
        words = set[str]()
        while len(words) < _VOCABULARY:
            syllables = range(rng.choice(script.num_syllables))
            word = "".join(rng.choice(slot) for _ in syllables for slot in slots).replace("-", "")
            words.add(unicodedata.normalize("NFC", word))
        self._words = sorted(words - {""})
        rng.shuffle(self._words)
        self._weights = list(accumulate(1 / (rank + 5) for rank in range(len(self._words))))
        self._phrases = [self.words(rng.randint(4, 8)) for _ in range(_PHRASES)]

    def words(self, num_words: int) -> list[str]:
        """Words by chance, a few of them after a number."""
        rng, space = self._rng, self._script.space
        words = rng.choices(self._words, cum_weights=self._weights, k=num_words)
        return [f"{rng.randint(2, 2999)}{space}{word}" if rng.random() < 0.03 else word for word in words]

    def words_with_phrases(self, num_words: int) -> list[str]:
        """Stock phrases, each between words that follow by chance."""
        words: list[str] = []
        while len(words) < num_words:
            words += self.words(self._rng.randint(8, 25))
            words += self._rng.choice(self._phrases)
        return [*words, *self.words(4)]

    def join(self, words: Sequence[str]) -> str:
        marks = (", ", ". ", " (", ") ") if self._script.space else ("，", "。", "（", "）")
        parts = []
        for word in words:
            parts += [self._rng.choice(marks) if self._rng.random() < 0.12 else self._script.space, word]
        return "".join(parts[1:])

    def text(self, num_words: int) -> str:
        return self.join(self.words_with_phrases(num_words))


class _Set:
    """Evaluation texts, copies of a part of each, texts that copy nothing, and the same for short evaluation texts."""

    def __init__(self, script: Script) -> None:
        rng = random.Random(0)
        writer = _Writer(script, rng)

        def altered(text: str) -> str:
            for alter in rng.sample(script.alterations, 2):
                text = alter(text, rng)
            return text

        self.passages, self.copies = [], []
        for _ in range(NUM_COPIES):
            words = writer.words_with_phrases(60)
            self.passages.append(writer.join(words))
            num_copied = rng.randint(*_COPIED_WORDS)
            first = rng.randint(0, len(words) - num_copied)
            copied = altered(writer.join(words[first : first + num_copied]))
            self.copies.append(script.space.join((writer.text(40), copied, writer.text(40))))
        self.others = [writer.text(rng.randint(50, 150)) for _ in range(NUM_OTHERS)]
        answers = [writer.words(rng.randint(2, 8)) for _ in range(NUM_COPIES)]
        self.answers = [writer.join(words) for words in answers]
        self.answer_copies = [altered(writer.join(words)) for words in answers]
        self.answer_quotes = [writer.join([*writer.words(20), *words]) for words in answers]


def _change_form(text: str, rng: random.Random) -> str:
    return unicodedata.normalize(rng.choice(("NFC", "NFD", "NFKC", "NFKD")), text)


def _change_case(text: str, rng: random.Random) -> str:
    return rng.choice((text.upper(), text.title(), _leave_out_marks(text.upper(), rng)))


def _leave_out_marks(text: str, rng: random.Random) -> str:
    return "".join(letter for letter in unicodedata.normalize("NFD", text) if unicodedata.category(letter) != "Mn")


def _stretch_words(text: str, rng: random.Random) -> str:
    return re.sub(r"[بتسصعفقكل]", lambda letter: letter[0] + "ـ" * (rng.random() < 0.2), text)


def _change_punctuation(text: str, rng: random.Random) -> str:
    marks = {mark: rng.choice((" – ", "… ", "; ", " “", "” ", "\u3001", " ")) for mark in ",.()，。（）"}
    return "".join(marks.get(letter, letter) for letter in text)


def _break_lines(text: str, rng: random.Random) -> str:
    return re.sub(" ", lambda space: rng.choice((" ", "  ", "\n", "\u00a0", " \u200b")), text)


def _break_lines_anywhere(text: str, rng: random.Random) -> str:
    parts = regex.findall(r"\d+|\X", text)
    return "".join(part + rng.choice(("\n", " ", "\u3000", "\u200b")) * (rng.random() < 0.1) for part in parts)


def _insert_invisible(text: str, rng: random.Random) -> str:
    invisible = "\u00ad\u200c\u200d\u200e\u2060\ufeff\ufe0f"
    return "".join(letter + rng.choice(invisible) * (rng.random() < 0.05) for letter in text)


def _change_width(text: str, rng: random.Random) -> str:
    """ASCII in full width, Katakana in half, and ligatures, as typesetting leaves them."""
    ligatures = text.replace("fi", "ﬁ").replace("ff", "ﬀ")
    return "".join(_NARROW.get(part, part) for part in unicodedata.normalize("NFD", ligatures).translate(_WIDE))


_WIDE = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
_NARROW = {unicodedata.normalize("NFKC", chr(code)): chr(code) for code in range(0xFF66, 0xFF9E)}
_NARROW |= {"\u3099": "\uff9e", "\u309a": "\uff9f"}
_ANY = (_change_form, _change_punctuation, _insert_invisible)
_SPACED = (*_ANY, _break_lines)
_UNSPACED = (*_ANY, _break_lines_anywhere)
_HANGUL = " ".join(chr(code) for code in range(0xAC00, 0xD7A4, 19))
_HAN = " ".join(chr(code) for code in range(0x4E00, 0x9FA0, 11))
_FEWER_HAN = " ".join(chr(code) for code in range(0x4E00, 0x9FA0, 99))
_HIRAGANA = " ".join(
    "あいうえおかがきぎくけげこさざしすせそただちつてでとどなにぬねのはばひぴふほまみむめもやゆよらりるれろわをん"
)
_KATAKANA = " ".join(
    "アイウカガキギクグコサザシジスゼソタダチテデトドナネノハバパヒビフブペホマミムメモヤユヨラリルレロワンー"
)
_ETHIOPIC = " ".join(chr(0x1208 + 8 * row + column) for row in range(30) for column in range(7) if row != 8)

SCRIPTS = {
    "Latin": Script(
        ("b c d f fi g k l m n p r s t v ç ß", "a e i o u é ü ô ñe ı", "- - n r s ff l"),
        (1, 2, 3),
        (*_SPACED, _change_case, _change_width),
    ),
    "Cyrillic": Script(
        ("б в г д ж з к л м н п р с т х ч ш", "а е ё и о у ы ю я й", "- - н р с ль"),
        (1, 2, 3),
        (*_SPACED, _change_case),
    ),
    "Greek": Script(
        ("β γ δ θ κ λ μ ν ξ π ρ σ τ φ χ ψ", "α ε η ι ο υ ω ά έ ή ί ό ύ ώ ΐ", "- - ν ς"),
        (1, 2, 3),
        (*_SPACED, _change_case),
    ),
    "Georgian": Script(
        ("ბ გ დ ვ ზ თ კ ლ მ ნ პ რ ს ტ ქ შ ჩ ც ძ წ ხ", "ა ე ი ო უ", "- - ს რ ნ"), (1, 2, 3), (*_SPACED, _change_case)
    ),
    "Arabic": Script(
        ("ا أ إ ب ت ج ح د ر س ش ص ع ف ق ك ل م ن ه و ي", "- - - - \u064e \u064f \u0650 \u0651\u064e"),
        (2, 3, 4, 5),
        (*_SPACED, _leave_out_marks, _stretch_words),
    ),
    "Hebrew": Script(
        ("א ב ג ד ה ו ז ח ט י כ ל מ נ ס ע פ צ ק ר ש ת", "- - - - \u05b0 \u05b4 \u05b7 \u05bc\u05b8"),
        (2, 3, 4, 5),
        (*_SPACED, _leave_out_marks),
    ),
    "Devanagari": Script(
        ("क ख ग घ च ज ज\u093c ट ड ड\u093c त द न प ब भ म य र ल व श स ह क\u094dष", "- - - ा ि ी ु े ो", "- - - - ं ँ"),
        (1, 2, 3),
        _SPACED,
    ),
    "Ethiopic": Script((_ETHIOPIC,), (2, 3, 4), _SPACED),
    "Korean": Script((_HANGUL,), (1, 2, 3, 4), _SPACED),
    "Chinese": Script((_HAN,), (1, 2, 2), (*_UNSPACED, _change_width), space=""),
    "Japanese": Script((f"{_FEWER_HAN} {_HIRAGANA} {_KATAKANA}",), (1, 2, 2), (*_UNSPACED, _change_width), space=""),
    "Thai": Script(
        ("- - - - เ ไ", "ก ข ค ง จ ช ด ต ท น บ ป พ ม ย ร ล ว ส ห อ", "- ั ิ ี ุ ู ื", "- - ่ ้", "- - - า ำ", "- - - น ง"),
        (1, 1, 2),
        _UNSPACED,
        space="",
    ),
}
