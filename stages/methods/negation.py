"""A sentence's negation by rules on its words, without a parser."""

import re

PERFECT = r"(?:has|have|had)(?=\s+(?:been|\w+ed)\b)"           # else it is a main verb: "had a dog"
NOT_AFTER = "".join(rf"(?<!\b{word} )" for word in ("a", "an", "the", "of", "in", "my", "his", "her")) + "(?<!^)"
NOUNS = rf"{NOT_AFTER}(?:can|will|might|may(?!\s+\d))"            # which may be names of things and people besides
AUXILIARIES = rf"\b(?:am|is|are|was|were|could|would|shall|should|must|{NOUNS}|{PERFECT})\b"

STEMS = {"ca": "can", "wo": "will", "sha": "shall"}
"""Of can't, won't and shan't; other stems are words themselves."""

RULES = {
    "drop n't": re.compile(
        r"\b(?P<stem>is|are|was|were|do|does|did|has|have|had|ca|could|wo|would|sha|should|must|might|need)"
        r"n\s*['’]\s*t\b"                                      # tokenizers leave spaces about the apostrophe
    ),
    "drop not of cannot": re.compile(r"\b(?P<stem>can)not\b"),
    "drop not": re.compile(r"\b[Nn]ot\s+"),
    "not after an auxiliary": re.compile(rf"(?P<auxiliary>{AUXILIARIES})(?!\s*['’])"),
}
"""The first rule that fits is applied, once, where it fits first.

They are lower case: May and Will are names. Uncased text has these, too, as it has a can and the will: after an
article, a preposition or nothing they are no auxiliaries. A plain verb would need its base form after do not, which
takes a parser.
"""


def negate(text: str) -> str | None:
    """The negation of a sentence, or None if no rule fits; what is negated already loses its not."""
    for pattern in RULES.values():
        negated, times = pattern.subn(_replacement, text, count=1)
        if times:
            return negated
    return None


def _replacement(found: re.Match[str]) -> str:
    parts = found.groupdict()
    if "auxiliary" in parts:
        return f"{parts['auxiliary']} not"
    stem = parts.get("stem", "")
    return STEMS.get(stem, stem)
