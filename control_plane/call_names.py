"""CallNames: which answers an HTTP call had, so that a request can be found by the X-Request-Id that its caller knows."""

from collections import OrderedDict

KEPT_NAMES = 1024
CALLS_OF_A_NAME = 8  # a caller may send the same name again and again


class CallNames:
    """The last KEPT_NAMES names. On the event loop's thread."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._by_call: dict[str, str] = {}

    def add(self, name: str, call_id: str) -> None:
        """An HTTP call of this name is answered as `call_id` (`chatcmpl-...`)."""
        calls = (*self._by_name.pop(name, ()), call_id)
        for forgotten in calls[:-CALLS_OF_A_NAME]:
            self._by_call.pop(forgotten, None)
        self._by_name[name] = calls[-CALLS_OF_A_NAME:]
        self._by_call[call_id] = name
        if len(self._by_name) > KEPT_NAMES:
            for forgotten in self._by_name.popitem(last=False)[1]:
                self._by_call.pop(forgotten, None)

    def calls_of(self, name: str) -> tuple[str, ...]:
        """Ids of the answers, oldest first; none for an unknown name."""
        return self._by_name.get(name, ())

    def name_of(self, call_id: str) -> str:
        """Empty when it is not known, or not any more."""
        return self._by_call.get(call_id, "")
