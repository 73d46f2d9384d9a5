"""How Sphinx builds the site: `make docs`. The pages are plain Markdown, which a code host shows as it is."""

project = "open_instruct"
html_title = "open_instruct"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False
extensions = ["myst_parser"]
# Links to a heading, as a code host names it: `page.md#what-counts`.
myst_heading_anchors = 4
# docs/README.md is the map that a code host shows; index.rst includes it.
exclude_patterns = ["README.md"]
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]  # `…` in an example's JSON or Python
