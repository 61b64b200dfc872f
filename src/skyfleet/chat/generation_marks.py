"""Generation marks: whether a template's `{% generation %}` encloses what is sampled.

Other trainers tokenise the conversation again and train on what stands within the marks. Here the
sampled tokens are kept and trained on, so the marks decide nothing; they are compared once.
"""

from __future__ import annotations

import re

from skyfleet.chat.probes import ANSWER, QUESTION
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.template import Template
from skyfleet.errors import ModelError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def why_marks_differ(template: Template, renderer: Renderer) -> str | None:
    """None where the template marks exactly the tokens of a turn, or marks nothing."""
    if not _MARK.search(template.text):
        return None
    try:
        token_ids, marks = template.marked([QUESTION, ANSWER])
        sampled = renderer.write(ANSWER)
    except ModelError as error:
        return f"the chat template's marks cannot be compared with what is sampled: {error}"
    marked = [token for token, mark in zip(token_ids, marks, strict=True) if mark]
    if marked == sampled:
        return None
    return (
        f"the chat template marks {renderer.text(marked)!r} as the model's own; "
        f"trained on is what is sampled, {renderer.text(sampled)!r}"
    )
