# The trainer with the versions that the tests use: docker build -t skyfleet .
# Run it on a GPU: docker run --gpus all -v "$PWD/runs:/home/skyfleet/runs" skyfleet train smollm2_h200
FROM python:3.11-slim-bookworm

# Triton compiles its launchers with gcc; the verifiers' jail is bubblewrap; SkyPilot copies with rsync.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc git libc6-dev rsync \
    && rm -rf /var/lib/apt/lists/*

# The packages change less often than the source, so they are a layer of their own.
WORKDIR /opt/skyfleet
ARG EXTRAS=train,s3,slack,wandb
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p src/skyfleet \
    && touch src/skyfleet/__init__.py \
    && pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" \
    && pip uninstall --yes skyfleet
COPY src src
RUN pip install --no-cache-dir --no-deps .

RUN useradd --create-home skyfleet
USER skyfleet
WORKDIR /home/skyfleet
ENTRYPOINT ["skyfleet"]
