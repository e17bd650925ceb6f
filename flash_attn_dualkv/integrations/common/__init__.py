# SPDX-License-Identifier: BSD-3-Clause
"""Parts that several integrations share."""
