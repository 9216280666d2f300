"""Imports of the server of `tests.ranks`, made once for all processes forked from it."""

import logging
import os

from d2plm.core.terminal import configure_logging

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork cannot use a GPU that its parent has asked for
configure_logging()  # libraries read the environment that it sets as they are imported
logging.getLogger().handlers.clear()  # each process has its own

import diffusers.training_utils  # noqa: E402, F401
import matplotlib.pyplot  # noqa: E402, F401
import mlflow.store.tracking.sqlalchemy_store  # noqa: E402, F401

import d2plm.commands.compare  # noqa: E402
import d2plm.commands.evaluate  # noqa: E402
import d2plm.commands.score  # noqa: E402
import d2plm.commands.train  # noqa: E402, F401
