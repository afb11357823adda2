"""A clock that stands still unless it is told to go on."""


class Clock:
    """Seconds since any moment, for what asks a clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def go_on(self, seconds: float) -> None:
        self.now += seconds
