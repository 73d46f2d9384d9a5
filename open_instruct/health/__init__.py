"""Rules that look at a run's metrics and say in a sentence what is wrong, with a cure and a link (docs/start/what_to_watch.md).

`rule.py` says what a rule is and how to add one, `rules/` has a file for each, `monitor.py` runs them on a run.
"""

from open_instruct.health import rules
from open_instruct.health.monitor import Monitor, assess
from open_instruct.health.rule import RULES, Alarm, Rule, all_rules

__all__ = ["RULES", "Alarm", "Monitor", "Rule", "all_rules", "assess", "rules"]
