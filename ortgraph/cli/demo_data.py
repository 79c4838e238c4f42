"""Real text that is on every machine: docstrings of the standard library, labelled by the package they come from.

Sources are parsed, never imported. The split, the order and the vocabulary depend on nothing but the text.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import pathlib
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from ortgraph.errors import InputError

# Packages and modules with many docstrings in Python 3.10 to 3.12, by class. Some classes join related modules so that
# the classes are of similar size.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "asyncio": ("asyncio", "concurrent", "selectors.py"),
    "email": ("email", "mailbox.py", "smtplib.py", "imaplib.py", "poplib.py"),
    "import": ("importlib", "pkgutil.py", "zipimport.py", "runpy.py", "modulefinder.py"),
    "logging": ("logging", "argparse.py", "configparser.py", "optparse.py", "getopt.py"),
    "xml": ("xml", "html", "xmlrpc", "plistlib.py"),
    "numbers": ("_pydecimal.py", "fractions.py", "statistics.py", "numbers.py", "random.py", "datetime.py"),
    "test": ("unittest", "doctest.py", "pdb.py", "bdb.py"),
    "network": ("http", "urllib", "socketserver.py", "ssl.py", "ftplib.py", "ipaddress.py", "wsgiref"),
    "files": ("pathlib.py", "shutil.py", "tarfile.py", "zipfile.py", "tempfile.py", "glob.py", "os.py", "gzip.py"),
    "inspect": ("inspect.py", "typing.py", "ast.py", "dis.py", "pydoc.py", "dataclasses.py", "enum.py"),
}
LENGTH = 128
VOCABULARY = 4096
PADDING, UNKNOWN = 0, 1
_FIRST_WORD = 2
_MIN_CHARACTERS = 40
_MIN_DOCUMENTS = 400  # below this a training run shows nothing
_HELD_OUT = 5  # one document in this many
_WORD = re.compile(r"[A-Za-z]+|\d+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class Documents:
    """Tokenized documents.

    Attributes:
        tokens: int64 [documents, LENGTH], padded with PADDING.
        labels: int64 [documents].
    """

    tokens: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def largest_class(self) -> float:
        """Share of the most frequent label: what guessing reaches."""
        return float(np.bincount(self.labels).max() / len(self))

    def batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """A batch by input name of the demo model."""
        return {"tokens": self.tokens[rows], "labels": self.labels[rows]}


@dataclasses.dataclass(frozen=True)
class DemoData:
    """The training and held-out documents."""

    train: Documents
    held_out: Documents
    classes: tuple[str, ...]

    def batches(self, size: int, count: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """``count`` training batches; each epoch is shuffled anew, its partial last batch left out."""
        rng = np.random.default_rng(seed)
        order = np.empty(0, np.int64)
        for _ in range(count):
            if len(order) < size:
                order = rng.permutation(len(self.train))
            yield self.train.batch(order[:size])
            order = order[size:]


def load_demo_data(root: pathlib.Path | None = None) -> DemoData:
    """Read, tokenize and split the docstrings.

    Args:
        root: Folder of the standard library's sources; this Python's when None.

    Raises:
        InputError: The sources are not there (a stripped Python installation).
    """
    root = root or pathlib.Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, int] = {}
    for label, entries in enumerate(CLASSES.values()):
        for text in _docstrings(root, entries):
            found.setdefault(text, label)  # a text that stands in two places keeps its first label
    if len(found) < _MIN_DOCUMENTS:
        raise InputError(
            f"{root}: only {len(found)} docstrings of the standard library", "use a Python with its .py sources"
        )
    texts = sorted(found, key=_digest)
    held_out = [t for t in texts if _digest(t) % _HELD_OUT == 0]
    train = [t for t in texts if _digest(t) % _HELD_OUT != 0]
    vocabulary = _vocabulary(train)
    return DemoData(_encode(train, found, vocabulary), _encode(held_out, found, vocabulary), tuple(CLASSES))


def _docstrings(root: pathlib.Path, entries: tuple[str, ...]) -> Iterator[str]:
    for entry in entries:
        path = root / entry
        folder = path if path.is_dir() else root / entry.removesuffix(".py")  # a module may be a package in this Python
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [path]
        for file in files:
            if file.is_file() and "test" not in file.parts and "tests" not in file.parts:
                yield from _docstrings_of(file)


def _docstrings_of(file: pathlib.Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return  # a file of another Python or encoding: the demo goes on without it
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if text is not None and len(text) >= _MIN_CHARACTERS:
            yield text


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _words(text: str) -> list[str]:
    return [w.lower() for w in _WORD.findall(text)]


def _vocabulary(texts: list[str]) -> dict[str, int]:
    counts = Counter(w for t in texts for w in _words(t))
    kept = sorted(counts, key=lambda w: (-counts[w], w))[: VOCABULARY - _FIRST_WORD]
    return {w: i + _FIRST_WORD for i, w in enumerate(kept)}


def _encode(texts: list[str], labels: Mapping[str, int], vocabulary: Mapping[str, int]) -> Documents:
    tokens = np.full((len(texts), LENGTH), PADDING, np.int64)
    for row, text in enumerate(texts):
        ids = [vocabulary.get(w, UNKNOWN) for w in _words(text)[:LENGTH]]
        tokens[row, : len(ids)] = ids
    return Documents(tokens, np.array([labels[t] for t in texts], np.int64))
