"""The console's pages, one file each; Streamlit runs them as scripts."""
