"""A command's own ``key=value`` items. Imports nothing heavy."""

from kd.errors import UserError
from kd.run.request import Request


def take(request: Request, *keys: str) -> dict[str, str]:
    """Removes a command's own ``key=value`` items from the request; the last of each counts."""
    own = {k: v for k, _, v in (item.partition("=") for item in request.overrides) if k in keys}
    request.overrides = [item for item in request.overrides if item.split("=", 1)[0] not in own]
    return own


def whole_number(own: dict[str, str], key: str, default: int) -> int:
    """A positive whole number of a command's own keys."""
    text = own.get(key, str(default))
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UserError(f"{key}: must be a whole number > 0, got '{text}'")
    return int(text)


def positive(key: str, text: str, below: float = 1e6) -> float:
    """A number > 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < below:
        raise UserError(f"{key}: must be a number > 0, got '{text}'")
    return value


def truth(own: dict[str, str], key: str) -> bool:
    """A yes or no of a command's own keys; no where it is not given."""
    text = own.get(key, "false").lower()
    if text not in ("true", "false"):
        raise UserError(f"{key}: must be true or false, got '{own[key]}'")
    return text == "true"


def refuse_foreign(request: Request, takes: tuple[str, ...]) -> None:
    """Raises a UserError for what is neither the command's own key nor of the run's data or teacher."""
    foreign = [item for item in request.overrides if not item.startswith(("data.", "model.teacher"))]
    if foreign:
        known = ", ".join(f"{key}=" for key in takes)
        raise UserError(f"no key '{foreign[0].split('=')[0]}' (it takes {known}{', ' * bool(known)}data.*)")
