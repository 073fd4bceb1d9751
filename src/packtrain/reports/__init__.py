"""A study or a run -> JSON, Markdown, figures and HTML pages.

`write_study` takes a study and leaves the folder of `packtrain plan`; `write_run_report` takes the folders of runs and
leaves one page. Both compute their numbers once and render all files from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.reports.run_page import write_run_report as write_run_report
    from packtrain.reports.study_files import write_study as write_study

__getattr__, __dir__, __all__ = lazy_names(__name__)
