"""What every script's command line does alike: one sentence instead of a traceback when the input is at fault."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from typing import NoReturn

from specdec.errors import InputError

# What a user can mend: no room, a folder that may not be written, a path that is not what it should be.
_USER_ERRNOS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and exit with what it returns (None is 0).

    An InputError becomes `error: <sentence>` on stderr and exit code 1. Any other exception is a fault of the program and keeps
    its traceback. (argparse exits with 2 by itself.)
    """
    try:
        code = main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except OSError as error:
        if error.errno not in _USER_ERRNOS:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130  # what a shell reports for a program stopped by Ctrl-C
    sys.exit(code)
