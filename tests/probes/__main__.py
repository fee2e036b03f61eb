from opgraft import _core
from tests import probes

if _core.in_use() is not None:  # else there is no compiler either, and nothing to be tested with it
    probes.load()
