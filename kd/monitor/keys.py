"""What a monitor records and does: the ``monitor`` keys, checked."""

import difflib
import re
from pathlib import Path

from kd.errors import UserError
from kd.report.prices import Prices, input_machines, price_of, read_prices
from kd.report.rules import RULES, by_rule
from kd.settings import MonitorSettings
from kd.storage.elsewhere import Json


class MonitorSpec(MonitorSettings):
    """What is recorded; :class:`kd.settings.MonitorSettings` explains the arguments."""

    def __post_init__(self) -> None:
        """Checks what one key needs of another, and sets ``price_per_hour`` from the table, where there is one.

        Raises:
            UserError: keys that miss another one, a table that can't be read or lacks a machine, or as of
                :meth:`_check_rules`.
        """
        if (self.prices is None) != (self.instances is None):
            raise UserError(
                "monitor.prices, monitor.instances: must be given together, a table and the machines in it"
            )
        if self.prices is not None and self.instances is not None:
            self.price_per_hour = price_of(self.instances, self.price_table())
        if self.budget is not None and not self.price_per_hour:
            raise UserError(
                f"monitor.budget: {self.budget:g} needs monitor.price_per_hour, the price of the whole job "
                "(or monitor.prices and monitor.instances)"
            )
        self._check_rules()

    def price_table(self) -> Prices:
        """The prices in the file ``prices``; {} without a file.

        Raises:
            UserError: it can't be read.
        """
        if self.prices is not None:
            return read_prices(Path(self.prices).expanduser())
        return {}

    def costs(self) -> Json:
        """What the run's records keep of prices, by the records' names; what is not known is left out.

        Returns:
            ``price_per_hour``: what the job costs an hour, as set or by the table. ``input_machines``: by name price, cores
            and GPUs (``price``, ``vcpus``, ``gpus``) of the table's machines with known cores; those without GPUs could
            make the batches, those with GPUs train instead.

        Raises:
            UserError: the table can't be read.
        """
        costs = {
            "price_per_hour": self.price_per_hour,
            "input_machines": input_machines(self.price_table()),
        }
        return {name: value for name, value in costs.items() if value not in (None, {})}

    def _check_rules(self) -> None:
        """Checks ``actions`` and ``thresholds``.

        Raises:
            UserError: a rule or threshold that does not exist, a count that is no whole number or too small (of steps to
                ``skip`` or ``ignore`` 0 is allowed), or a webhook without an address.
        """
        for rule, action in (self.actions or {}).items():
            _check_known(f"monitor.actions.{rule}", rule, list(RULES))
            if action == "webhook" and not re.match(r"https?://.", self.webhook or ""):
                given = "nothing"
                if self.webhook:
                    given = f"'{self.webhook}'"
                raise UserError(
                    f"monitor.webhook: an http(s) address to post {rule} to, got {given}"
                )
        for rule, values in by_rule(self.thresholds or {}).items():
            _check_known(f"monitor.thresholds.{rule}", rule, list(RULES))
            judged = RULES[rule]
            for name, value in values.items():
                key = f"monitor.thresholds.{rule}.{name}"
                _check_known(key, name, list(judged.thresholds))
                least = 0 if name in ("skip", "ignore") else 1
                if name in judged.counts and not (value >= least and float(value).is_integer()):
                    raise UserError(f"{key}: must be a whole number >= {least}, got {value:g}")


def _check_known(key: str, name: str, names: list[str]) -> None:
    """Raises a user's error for a ``name`` outside ``names``: it begins with ``key`` and suggests the nearest of them, or
    lists all where none is near.
    """
    if name not in names:
        shown = difflib.get_close_matches(name, names, 1)
        if not shown:
            shown = names
        known = ", ".join(shown) or "none"
        raise UserError(f"{key}: no '{name}'; known: {known}")
