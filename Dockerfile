# locant in a container: docker build -t locant . && docker run --rm -v "$PWD:/work" locant plot alibi -o alibi.png
# For the smaller torch without CUDA, give pip its index: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL=""
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir -c /wheels/constraints.txt "$(echo /wheels/*.whl)[lab,data,explore]" \
    && useradd --create-home locant && mkdir /work && chown locant /work
USER locant
WORKDIR /work
ENTRYPOINT ["locant"]
CMD ["--help"]
