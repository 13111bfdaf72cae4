"""Programs that search for noise, and report what is spent every few steps."""

import tests.support.accountants  # noqa: F401 - makes them fast
