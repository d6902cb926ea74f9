# Decides from PHASEKV_CUDA whether this build has CUDA, and says so in PHASEKV_WITH_CUDA.

set(PHASEKV_WITH_CUDA OFF)
if(NOT PHASEKV_CUDA MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "PHASEKV_CUDA is \"${PHASEKV_CUDA}\", must be AUTO, ON or OFF")
endif()

if(NOT PHASEKV_CUDA STREQUAL "OFF")
    # Named, never "native": the machine that builds need not have a GPU.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual)
    endif()
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
        enable_language(CUDA)
        find_package(CUDAToolkit QUIET)
        if(CUDAToolkit_FOUND)
            set(PHASEKV_WITH_CUDA ON)
        endif()
    endif()
    if(PHASEKV_CUDA STREQUAL "ON" AND NOT PHASEKV_WITH_CUDA)
        message(
            FATAL_ERROR
            "PHASEKV_CUDA=ON but no working CUDA toolkit was found. Put nvcc on PATH or set "
            "CMAKE_CUDA_COMPILER, or build for the CPU alone with PHASEKV_CUDA=OFF."
        )
    endif()
endif()

if(PHASEKV_WITH_CUDA)
    message(STATUS "PhaseKV: CUDA toolkit ${CUDAToolkit_VERSION} found")
else()
    message(STATUS "PhaseKV: CPU only (PHASEKV_CUDA=${PHASEKV_CUDA})")
endif()
