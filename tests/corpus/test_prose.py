"""Prose is told from code and markup."""

from pathlib import Path

import pytest

from stages.corpus.prose import CodeFiles, docstrings, documentation_files, is_prose, passages, prose_in

DOCSTRING = '''
Return the sum of **all** elements over the `given` axis.

The result is a new array; see :func:`~library.module.mean`
for the average.  A second sentence with ``code``.

Parameters
----------
axis : int
    The axis that the sum is taken over.

Notes
-----
The sum of an empty array is zero [1]_, as it is everywhere.

.. note:: This is a directive with text in it.

Use it like this::

    This is a literal block and no prose at all.

>>> total([1, 2])
3

* A list item is not a paragraph of prose.

```
This is in a fence and therefore it is code.
```

+-----+-----+
| a   | b   |
+-----+-----+

See the [manual](target) for the rest of it.
'''


def test_paragraphs_are_kept_without_their_markup() -> None:
    assert list(passages(DOCSTRING)) == [
        "Return the sum of all elements over the given axis.",
        "The result is a new array; see library.module.mean for the average.  A second sentence with code.",
        "The sum of an empty array is zero, as it is everywhere.",
        "Use it like this::",
        "See the manual for the rest of it.",
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "Return the sum of all elements over the given axis.",
        "Is the user's input (if there is any) well-formed?",
        "This takes 3 seconds, or 25% of the time.",
    ],
)
def test_english_sentences_are_prose(sentence: str) -> None:
    assert is_prose(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "return the sum of all elements.",                     # no beginning
        "The sum of all elements of the array",                # no end
        "It is so.",                                           # too little
        "See library.module.mean for the average of it.",      # a name
        "The snake_case of the name is kept.",
        "The camelCase of the name is kept.",
        "The value of x = 3 is used in the test.",
        "Compute matrix eigenvalues numerically via iteration.",    # no common word: a title
        "The first (of two is kept in the list.",
    ],
)
def test_code_and_scraps_are_not(sentence: str) -> None:
    assert not is_prose(sentence)


def test_docstrings_are_found_without_importing() -> None:
    module = b'"""Of the module, long enough to count."""\nclass A:\n    """Of the class."""\n    def f(self):\n'
    module += b'        """Of the method."""\n        return """Of nothing."""\n'
    assert list(docstrings(module)) == ["Of the module, long enough to count.", "Of the class.", "Of the method."]
    assert list(docstrings(b'"""Of what does not parse."""\nprint "x"\n')) == []
    assert list(docstrings(b'"""Too little."""\n' + b"x = 1\n" * 99)) == []


def test_documents_of_all_kinds_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A title\n\nThis is a sentence of the guide.\n")
    metadata = "Name: x\nSummary: A header is not prose of the text.\n\nThis is the text of it.\n"
    (tmp_path / "METADATA").write_text(metadata)
    kept, counts = prose_in(CodeFiles((str(tmp_path / "a.md"), str(tmp_path / "METADATA"))))
    assert kept == ["This is a sentence of the guide.", "This is the text of it."]
    assert counts["files"] == 2


def test_the_installed_documentation_is_listed_in_the_same_order_each_time() -> None:
    listed = list(documentation_files())
    assert listed == list(documentation_files())
    paths = [path for group in listed for path in group.paths]
    assert any(path.endswith("numpy/__init__.py") for path in paths)
    assert any(path.endswith("argparse.py") for path in paths)
    assert not [path for path in paths if "/tests/" in path]
