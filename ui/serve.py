"""Streamlit's own command, after everything that pages need has been imported once, in one thread.

Plotly looks for numpy and pandas among the loaded modules and would find them half imported while a first viewer's thread
is at it; and a first viewer should not wait for imports.
"""

import sys

import numpy  # noqa: F401
import pandas  # noqa: F401
import plotly.graph_objects  # noqa: F401
import pyarrow  # noqa: F401
from streamlit.web.cli import main

from ui import act, draft, field_form, frame, inference, maps, money, revisions  # noqa: F401

if __name__ == "__main__":
    sys.exit(main(prog_name="streamlit"))
