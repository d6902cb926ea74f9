# Decides from PHASEKV_CUDA whether this build has CUDA, and says so in PHASEKV_WITH_CUDA.

# Those of A100, of H100 and H200, and of B200 and RTX 50 where the compiler knows them; PTX for every
# other after 90. Named, never "native": the machine that builds need not have a GPU.
function(phasekv_cuda_architectures compiler architectures)
    execute_process(COMMAND ${compiler} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
    set(chosen 80-real 90-real 90-virtual)
    foreach(architecture IN ITEMS 100 120)
        if(known MATCHES "sm_${architecture}\n")
            list(APPEND chosen ${architecture}-real)
        endif()
    endforeach()
    set(${architectures} ${chosen} PARENT_SCOPE)
endfunction()

set(PHASEKV_WITH_CUDA OFF)
if(NOT PHASEKV_CUDA MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "PHASEKV_CUDA is \"${PHASEKV_CUDA}\", must be AUTO, ON or OFF")
endif()

if(NOT PHASEKV_CUDA STREQUAL "OFF")
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
        if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
            phasekv_cuda_architectures(${CMAKE_CUDA_COMPILER} CMAKE_CUDA_ARCHITECTURES)
        endif()
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
    message(
        STATUS
        "PhaseKV: CUDA toolkit ${CUDAToolkit_VERSION} found, kernels for ${CMAKE_CUDA_ARCHITECTURES}"
    )
else()
    message(STATUS "PhaseKV: CPU only (PHASEKV_CUDA=${PHASEKV_CUDA})")
endif()
