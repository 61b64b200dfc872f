"""One GRPO step on one CPU core: skyfleet beside TRL, in CPU-seconds, as a table for docs/benchmarks.md.

    python benchmarks/cpu_step.py --steps 7

Both sides get the same random weights, tokenizer, prompts and optimiser, and sample the same number
of tokens. A random model calls no tool, so what it samples in a turn that should call one is
replaced, token by token, with a call; both sides pay for the sampling, neither for the replacing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from platform import machine, python_version
from statistics import median
from time import process_time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from skyfleet.algorithms.advantages import grpo
from skyfleet.algorithms.filters import keep_graded
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.reduction import token_mean
from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.completion import Completion
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.sampling import SamplingParams
from skyfleet.envs.env import Opening, Step
from skyfleet.envs.worlds.catalog import world_tasks
from skyfleet.learner.optimizer import OptimizerSettings
from skyfleet.learner.single import LearnerSettings, SingleLearner
from skyfleet.models.decoder import Decoder
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.rollouts.conversation import Policy, TokenConversation
from skyfleet.rollouts.limits import Limits
from skyfleet.tasks.grade import Grade
from skyfleet.tasks.sampling import TaskSampler
from skyfleet.tasks.task import Task
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.trainer.loop import train_step
from skyfleet.trainer.run import Run
from skyfleet.trainer.schedule import Schedule
from skyfleet.trainer.state import TrainerState
from skyfleet.weight_sync.sync import InProcessSync

N_PROMPTS, N_SAMPLES = 4, 4
TURN_LENGTH = 64
"""Tokens; every turn samples exactly so many."""
N_CALLS = 3
"""Tool calls an episode, then one answer."""
CAPACITY = 1024
LR = 1e-6
WARM_UP_STEPS = 3
PEER = "trl"
