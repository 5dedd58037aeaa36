# Wherry on torch's CUDA image:   docker build -t wherry .   and   docker run --gpus all --ipc=host -it wherry bash
# Another torch of 2.9 to 2.14:   docker build --build-arg TORCH=2.9.1-cuda12.6-cudnn9 -t wherry .
ARG TORCH=2.9.1-cuda12.8-cudnn9

# The native library needs a compiler; the image that runs does not.
FROM pytorch/pytorch:${TORCH}-devel AS build
# Where the image's Python is the system's, pip asks for this.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
WORKDIR /wherry
COPY . .
RUN python -m pip wheel --no-deps --wheel-dir /wheels .

FROM pytorch/pytorch:${TORCH}-runtime
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
# torch is there already, and fits.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels python -m pip install /wheels/*.whl
RUN useradd --create-home --shell /bin/bash --uid 10001 wherry
USER 10001
WORKDIR /home/wherry
# Without a GPU, as while the image is built, it says so and ends with 0.
RUN wherry doctor
CMD ["wherry", "doctor"]
