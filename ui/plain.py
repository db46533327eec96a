"""Text from elsewhere, shown as it is: a reason, a model's answer or a value must not become a link, a picture or a heading.

A picture in Markdown would make every operator's browser fetch it from wherever its author wants.
"""

import re

_SIGNS = re.compile(r"([\\`*_{}\[\]()#+\-.!|<>~$:&=@/^\"'])")
MAX_CHARS = 4000


def plain(text: object) -> str:
    """`text` for a Markdown element: every sign that Markdown or Streamlit reads is escaped, line breaks are kept."""
    return _SIGNS.sub(r"\\\1", str(text)[:MAX_CHARS])
