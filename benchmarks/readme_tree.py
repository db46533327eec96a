"""`make docs`: writes the tree in README.md, a phrase per file taken from the file's own first sentence.

With `--check` writes nothing and exits 1 when the tree is not current.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FOLDERS = ("runtime", "pallas_kernels", "control_plane", "ui", "benchmarks")
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->\n"
MAX_PHRASE = 120
_HERE_AND_NOW = re.compile(r"^`[^`]*`:\s*")


def render() -> str:
    """The tree as a fenced block; `__init__.py` files hold a line about their folder, which heads it."""
    lines = ["```"]
    for folder in FOLDERS:
        lines += _folder(ROOT / folder, 0)
    return "\n".join([*lines, "```", ""])


def phrase(source: str) -> str:
    """First sentence of a module's docstring, shortened at a word."""
    text = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    text = _HERE_AND_NOW.sub("", text)
    sentence = re.split(r"(?<=[a-z0-9)`])[.](?:\s|$)", text, maxsplit=1)[0].rstrip(".")
    sentence = (
        sentence[:1].upper() + sentence[1:] if sentence[:1].isalpha() and " " in sentence[:20] else sentence
    )
    if len(sentence) <= MAX_PHRASE:
        return sentence
    first_part = re.split(r";\s", sentence, maxsplit=1)[0]
    if len(first_part) <= MAX_PHRASE:
        return first_part
    return sentence[:MAX_PHRASE].rsplit(" ", 1)[0].rstrip(" ,;:") + " ..."


def _folder(folder: Path, depth: int) -> list[str]:
    init = folder / "__init__.py"
    head = phrase(init.read_text(encoding="utf-8")) if init.is_file() else ""
    lines = [_line(f"{folder.name}/", head, depth)]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(_line(path.name, phrase(path.read_text(encoding="utf-8")), depth + 1))
    for path in sorted(p for p in folder.iterdir() if p.is_dir() and any(p.rglob("*.py"))):
        lines += _folder(path, depth + 1)
    return lines


def _line(name: str, text: str, depth: int) -> str:
    return f"{'  ' * depth + name:<30} {text}".rstrip()


def with_tree(page: str) -> str:
    """The page with its tree replaced. Raises ValueError without the two marks."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"README.md lacks the marks {BEGIN.strip()} and {END.strip()}")
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + render() + END + rest.partition(END)[2]


def main() -> int:
    page = README.read_text(encoding="utf-8")
    wanted = with_tree(page)
    if "--check" in sys.argv[1:]:
        if page != wanted:
            print("the tree in README.md is not current: run make docs", file=sys.stderr)
        return int(page != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
