# make serve   build, install, bring the default model, serve it on 127.0.0.1:8000 (or PORT=…)
# make test    everything that must pass: lint, types, imports, native and Python tests
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PORT ?= 8000
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
# Tests start hundreds of processes, which find the bytecode of the ones before.
unexport PYTHONDONTWRITEBYTECODE
NATIVE := $(shell find native CMakeLists.txt pyproject.toml -type f)
BIN := $(VENV)/bin

.PHONY: serve test build lint types imports native-test sanitize python-test format clean

serve: $(VENV)/.installed
	$(BIN)/invar serve --host 127.0.0.1 --port $(PORT)

test: lint types imports native-test sanitize python-test

build: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Invar needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(NATIVE)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(BIN)/python $(NATIVE)
	$(BIN)/pip install --quiet --editable '.[dev]' --config-settings build-dir=build/native
	touch $(VENV)/.installed $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find native -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

# Beside the objects of the package itself: nothing is compiled twice.
native-test: $(VENV)/.dev
	$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DINVAR_NATIVE_TESTS=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) >/dev/null
	$(BIN)/cmake --build build/native --target native_tests -j $(JOBS)
	$(BIN)/ctest --test-dir build/native -j $(JOBS) --output-on-failure

# Memory and undefined behaviour in all kernels; data races in the pool and the executor.
sanitize: $(VENV)/.dev
	for kind in address,undefined thread; do \
	  $(BIN)/cmake -S . -B build/$$kind -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	    -DINVAR_NATIVE_TESTS=ON -DINVAR_SANITIZE=$$kind \
	    -DPython_EXECUTABLE=$(abspath $(BIN)/python) >/dev/null || exit 1; \
	done
	$(BIN)/cmake --build build/address,undefined --target native_tests -j $(JOBS)
	$(BIN)/ctest --test-dir build/address,undefined -j $(JOBS) --output-on-failure
	$(BIN)/cmake --build build/thread --target runtime_test -j $(JOBS)
	TSAN_OPTIONS=die_after_fork=0 $(BIN)/ctest --test-dir build/thread -R runtime_test \
	  --output-on-failure

python-test: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not alone'
	$(BIN)/pytest -m alone

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find native -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build .venv invar/*.so
