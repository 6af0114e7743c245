"""What jsonargparse and our constructors report, as one line that names the key."""

import re

from kd.run import keys
from kd.run.suggest import hint, near
from kd.run.trust import refused
from kd.run.typed import TYPES, no_class, no_plain_value

LENGTH = 300
BUILDER = "build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module, with these annotations"


def one_line(message: str) -> str:
    """jsonargparse's message, which can be a paragraph, in one line that starts with the key."""
    text = " ".join(message.split())
    unknown = re.search(
        r"unrecognized arguments: --([\w.+-]+)|^Option '([\w.]+)' is not accepted", text, re.I
    )
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text)
    if unknown or group:
        key = ".".join(group.groups()) if group else next(k for k in unknown.groups() if k)  # type: ignore[union-attr]
        return f"no key '{key}'{hint(key, keys.schema())}"
    found = re.findall(r'[Pp]arser key "([^"]+)":', text)
    if not found:
        return _short(text)
    key = found[-1] if found[-1].startswith(found[0]) else found[0]
    values = re.findall(
        r"(?:Given value: |Got value: |Unable to load config \")(.*?)(?=\"?$| Given value)", text
    )
    given = values[-1] if values else ""
    nested = re.search(r"NestedArg\(key='([\w.]+)', val=(.*)\)$", text)
    if nested:
        key, given = f"{key}.{nested[1]}", nested[2].strip("'\"")
    if re.search(r'Unable to load config "[^"]*"$', text):
        return _short(no_plain_value(key, given))
    return _short(_reason(key, given, _reasons(text)))


def missing(message: str) -> str:
    """Replaces jsonargparse's words for missing required arguments."""
    return re.sub(r"the following arguments are required: (.*)", r"needs \1", message)


def _short(text: str) -> str:
    return text if len(text) <= LENGTH else text[: LENGTH - 3] + "..."


def _reasons(text: str) -> list[str]:
    """What each member of a union has against the value, the most telling last; null is always refused."""
    text = re.sub(r" Given value type: .*$", "", text)
    text = re.sub(r'^.*[Pp]arser key "[^"]+": ?', "", text)
    parts = re.split(r"(?:^|Errors:)? - ", text) if "Errors:" in text else [text]
    parts = [re.sub(r"\. Got value: .*$", "", part).strip() for part in parts]
    parts = [
        p
        for p in parts
        if p and "Subtypes:" not in p and "NoneType" not in p and "Expected a path" not in p
    ]
    return sorted(parts, key=lambda part: "Expected a <class" not in part)


def _reason(key: str, given: str, reasons: list[str]) -> str:
    last = reasons[-1] if reasons else "is not understood"
    field = re.match(r"([a-z_]\w*): Expected ", last)  # a dataclass names its own
    if field:
        key = key if key.endswith(f".{field[1]}") else f"{key}.{field[1]}"
        reasons = [
            part.removeprefix(f"{field[1]}: ")
            for part in reasons
            if part.startswith(f"{field[1]}: ")
        ]
        last = reasons[-1]
    wrong_class = re.search(
        r"Expected a dot import path string: (\S+)|Unexpected import path format: (\S+)", last
    )
    if wrong_class:
        named = any(
            part in key for part in ("source", "losses", "callbacks", "logger", "strategy", "task")
        )
        path = wrong_class[1] or wrong_class[2]
        return f"{key}: {no_class(key, path)}" if named else no_plain_value(key, path)
    denied = re.search(r"Importing '([\w.]+)' is not allowed", " ".join(reasons))
    if denied:
        return f"{key} {refused(denied[1])}"
    option = re.search(r"Option '([\w.]+)' is not accepted|Key '([\w.]+)' is not expected", last)
    if option:
        name = option[1] or option[2]
        kinds = [kind for bases in keys.CLASSES.values() for kind in keys.subclasses(*bases)]
        known = {
            argument
            for kind in [*kinds, "Projection", "TapSpec"]
            for argument in keys.arguments(kind)
        }
        return f"{key}: no option '{name}'{near(name, sorted(known | {k.rpartition('.')[2] for k in keys.schema()}))}"
    protocol = re.search(r"Import path ([\w.]*) ?does not implement protocol (\w+)", last)
    if protocol:
        needs = f"needs the method {BUILDER}" if protocol[2] == "Builder" else "lacks its methods"
        return f"{key}: {protocol[1] or given} is no {protocol[2]}: it {needs}"
    wanted = [name for name in (_wanted(part) for part in reasons) if name]
    if wanted and len(wanted) == len(reasons):
        return f"{key}: must be {' or '.join(dict.fromkeys(wanted))}, got '{given}'"
    return f"{key}: {missing(last.removeprefix(key.rpartition('.')[2] + ': '))}"


def _wanted(reason: str) -> str | None:
    literal = re.fullmatch(r"Expected a typing\.Literal\[(.*)\]", reason)
    if literal:
        return f"one of {literal[1]}".replace("'", "")
    kind = re.fullmatch(r"Expected a <class '([\w.]+)'>", reason)
    if not kind:
        return None
    name = kind[1].rpartition(".")[2]
    return TYPES.get(name, name)
