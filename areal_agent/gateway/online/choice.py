"""Which groups a batch takes, and when that may have changed. It leases nothing and knows no ledger."""

from areal_agent.gateway.online.bodies import LeaseRequest
from areal_agent.gateway.online.group import Group
from areal_agent.gateway.online.groups import Groups


class Choice:
    """The oldest ready groups; stragglers are waited for, once for each train step."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._stragglers_until_s: dict[int, float] = {}  # by train step

    def groups(self, request: LeaseRequest, now_s: float) -> tuple[Group, ...]:
        """Those that the batch takes now; none when there are fewer than were asked for, or stragglers to wait for.

        Fewer than were asked for are taken when waiting would bring no more.
        """
        ready = self._groups.ready(now_s)
        taken = ready if self._groups.is_stuck(now_s) else _enough(ready, request)
        return () if taken and self._must_wait(request, now_s) else taken

    def next_look_s(self, step: int, now_s: float, deadline_s: float) -> float:
        """When time alone may have changed what is taken."""
        times = (self._groups.next_expiry_s(now_s), self._stragglers_until_s.get(step), deadline_s)
        return min((time_s for time_s in times if time_s is not None and time_s > now_s), default=deadline_s)

    def done(self) -> None:
        """The batch is leased."""
        self._stragglers_until_s.clear()

    def _must_wait(self, request: LeaseRequest, now_s: float) -> bool:
        """Whether there are stragglers that may yet end before the batch has to go without them."""
        if not self._groups.stragglers(request.step):
            return False
        return now_s < self._stragglers_until_s.setdefault(request.step, now_s + request.straggler_wait_s)


def _enough(ready: tuple[Group, ...], request: LeaseRequest) -> tuple[Group, ...]:
    """As many as were asked for, the first ones; none when there are fewer."""
    if request.num_groups is not None:
        return ready[: request.num_groups] if len(ready) >= request.num_groups else ()
    missing = request.num_trajectories or 0
    for number, group in enumerate(ready, start=1):
        missing -= len(group.waiting)
        if missing <= 0:
            return ready[:number]
    return ()
