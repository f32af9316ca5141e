"""English prose out of the documentation that Python and the installed libraries carry."""

import ast
import hashlib
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cache
from importlib.metadata import Distribution, distributions
from inspect import cleandoc
from pathlib import Path
from platform import python_version

import sentencex

GROUP = 4 * 2**20                                              # bytes of files that one task reads
DOCUMENTED = 0.4                                               # of a module's bytes; less is not worth the parsing

_SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "vendor", "vendored", "licenses", "idlelib", "lib2to3"} | {
    "site-packages",                                           # within the standard library's folder
    "..",                                                      # scripts and manuals
}
_SKIPPED_NAMES = re.compile(r"licen[sc]e|copying|authors|change|history|news|notice", re.IGNORECASE)
_PROSE_SUFFIXES = (".rst", ".md")


@dataclass(frozen=True)
class CodeFiles:
    """Modules and documents that one task reads."""

    paths: tuple[str, ...]


def documentation_files() -> Iterator[CodeFiles]:
    """The modules and documents of the standard library and all installed distributions, in groups."""
    held, size = list[str](), 0
    for path in [*_standard_library(), *_installed()]:
        held.append(str(path))
        size += path.stat().st_size
        if size >= GROUP:
            yield CodeFiles(tuple(held))
            held, size = [], 0
    if held:
        yield CodeFiles(tuple(held))


def documented_versions() -> dict[str, str]:
    """What is read, with versions: equal ones give equal sentences."""
    return {"python": python_version()} | {name: found.version for name, found in _distributions().items()}


def versions_digest() -> str:
    """One short name for all that is read."""
    return hashlib.sha256(repr(sorted(documented_versions().items())).encode()).hexdigest()[:16]


@cache
def _distributions() -> dict[str, Distribution]:
    installed = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})   # and nothing else in sys.path
    return dict(sorted((found.name.lower(), found) for found in distributions(path=installed)))


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if _is_wanted(path.relative_to(root)))


def _installed() -> Iterator[Path]:
    for distribution in _distributions().values():
        for file in sorted(distribution.files or []):
            path = Path(str(distribution.locate_file(file)))
            if _is_wanted(Path(file)) and path.is_file():
                yield path


def _is_wanted(path: Path) -> bool:
    """Whether a path relative to its library is a module or document with prose of that library's own."""
    if path.is_absolute() or _SKIPPED_FOLDERS.intersection(path.parts):
        return False
    if path.name == "METADATA":
        return True
    return path.suffix == ".py" or (path.suffix in _PROSE_SUFFIXES and not _SKIPPED_NAMES.search(path.name))


def prose_in(files: CodeFiles) -> tuple[list[str], Counter[str]]:
    """The sentences of prose in the files, and how many other sentences were passed over."""
    kept, counts = list[str](), Counter[str]()
    for path in map(Path, files.paths):
        for passage in _passages_of_file(path):
            for sentence in sentencex.segment("en", passage):
                if is_prose(sentence.strip()):
                    kept.append(sentence.strip())
                else:
                    counts["not_prose"] += 1
    counts["files"] = len(files.paths)
    return kept, counts


def _passages_of_file(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    if path.suffix == ".py":
        for docstring in docstrings(data):
            yield from passages(docstring)
    elif path.name == "METADATA":
        description = HeaderParser().parsestr(data.decode(errors="replace")).get_payload()
        yield from passages(str(description))
    else:
        yield from passages(data.decode(errors="replace"))


_QUOTED = re.compile(rb'^[ \t]*[rRuU]?"""(.*?)"""', re.DOTALL | re.MULTILINE)


def docstrings(module: bytes) -> Iterator[str]:
    """The docstrings in a module's source, if they make up enough of it; none if it does not parse."""
    if sum(map(len, _QUOTED.findall(module))) < DOCUMENTED * len(module):
        return                                                 # seen at a hundredth of the cost of parsing
    try:
        with warnings.catch_warnings(action="ignore"):         # of the library's own invalid escapes
            todo: list[ast.AST] = [ast.parse(module)]
    except (SyntaxError, ValueError):
        return
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                yield docstring
            todo.extend(reversed(node.body))


_FENCED = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.DOTALL | re.MULTILINE)
_NO_PARAGRAPH = re.compile(r">>>|\.\.\.|\.\. |[-*+#|=<>!:\[$%@]|\d+[.)]|\w+ ?: ")    # how markup and lists begin
_UNDERLINE = re.compile(r"([-=~^\"'*#+_.`])\1{2,}$")
_MARKUP = [
    (re.compile(r":[\w:+-]+:`~?([^`<]*?)(?: *<[^`>]*>)?`"), r"\1"),     # :class:`name`, :ref:`text <target>`
    (re.compile(r"`([^`<]+?) *<[^`>]*>`__?"), r"\1"),                   # `text <url>`_
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),                    # [text](url)
    (re.compile(r"(\*\*|__|\*|``|`)(?=\S)(.+?)(?<=\S)\1_?"), r"\2"),    # **strong**, *emphasis*, `code`
    (re.compile(r" ?\[[\w*#]+\]_"), ""),                                # [1]_
]


def passages(document: str) -> Iterator[str]:
    """The paragraphs of running text in reStructuredText, Markdown or a docstring, without their markup.

    A paragraph is a block of lines that all begin at the margin: so code, parameters, literal blocks
    and the bodies of directives, which are indented, fall out, and so do lists, tables and headings.
    """
    for block in re.split(r"\n[ \t]*\n", _FENCED.sub("\n\n", cleandoc(document))):
        lines = block.strip("\n").split("\n")
        if len(lines) > 1 and _UNDERLINE.match(lines[1]):              # a heading, with or without space below
            lines = lines[2:]
        if any(not line or line[0].isspace() or _NO_PARAGRAPH.match(line) or _UNDERLINE.match(line) for line in lines):
            continue
        passage = " ".join(lines)
        for markup, plain in _MARKUP:
            passage = markup.sub(plain, passage)
        if passage:
            yield passage


_WORD = re.compile(r"[(\"']?(?:[A-Za-z]+(?:['’-][A-Za-z]+)*|\d+(?:[.,]\d+)*%?)[)\"']?[,;:]?[)\"']?")
_CAMEL = re.compile(r"[a-z][A-Z]")
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be been but by can do does for from has have if in into is it its may more must no not "
        "of on one only or other should so such than that the their them then there these they this to use used "
        "uses using was we when where which will with would you your",
    )
)


def is_prose(sentence: str) -> bool:
    """Whether this reads as an English sentence: words throughout, common ones among them, and a full stop."""
    bare = sentence.rstrip("\"')")
    if not sentence[:1].isupper() or not bare.endswith((".", "?", "!")) or bare.endswith("..."):
        return False
    words = sentence.rstrip(".?!\"')").split()
    if len(words) < 5 or any(not _WORD.fullmatch(word) or _CAMEL.search(word) for word in words):
        return False
    if sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return False
    return sum(word.lower().strip("(\"',;:)") in _COMMON for word in words) >= max(2, len(words) // 6)
