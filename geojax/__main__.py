# SPDX-License-Identifier: Apache-2.0
"""`python -m geojax`."""

import sys

from geojax.cli import main

sys.exit(main())
