# Private and data-parallel training with the versions of constraints.txt; see docs/cluster.md.
FROM python:3.12-slim

# Triton compiles launchers with a C compiler when a kernel first runs; make and git are for the tests.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev make git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /project
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ddp ddp
COPY dp_clipping dp_clipping
COPY ddp_by_hand ddp_by_hand
RUN pip install --no-cache-dir -c constraints.txt -e '.[test,docs]'
COPY . .

CMD ["make", "test", "VENV=0"]
