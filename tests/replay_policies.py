"""Routing policies that tests name by `module:Class`."""

from kvbus.router.policies import RouteChoice, RouteQuestion


class Crowding:
    """Everything to the first engine of each role."""

    name = "crowding"

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """The first by name."""
        prefill_id, decode_id = (
            min((view.engine_id for view in views), default="") for views in (question.prefills, question.decodes)
        )
        return RouteChoice(mode="early", prefill_id=prefill_id, decode_id=decode_id, reason="the first")


class Inventing:
    """Chooses what was not offered."""

    name = "inventing"

    def choose(self, _question: RouteQuestion) -> RouteChoice:
        """Nobody's engine."""
        return RouteChoice(mode="early", prefill_id="nobody", decode_id="nobody", reason="invented")


class Raising:
    """Fails."""

    name = "raising"

    def choose(self, _question: RouteQuestion) -> RouteChoice:
        """Never."""
        raise LookupError("no idea")
