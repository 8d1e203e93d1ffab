# SPDX-License-Identifier: Apache-2.0
"""A trained model over HTTP: requests, their queue, the thread that answers, the server."""
