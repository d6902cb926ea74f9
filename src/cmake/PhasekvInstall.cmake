# Installs the headers, the library and the package that find_package(phasekv) reads.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/phasekv")
install(
    TARGETS phasekv phasekv_cuda
    EXPORT phasekv-targets
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT cpp
)
install(
    DIRECTORY "${PROJECT_SOURCE_DIR}/include/"
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
    COMPONENT cpp
)
install(EXPORT phasekv-targets NAMESPACE phasekv:: DESTINATION "${package_dir}" COMPONENT cpp)
configure_package_config_file(
    "${CMAKE_CURRENT_LIST_DIR}/phasekv-config.cmake.in"
    "${PROJECT_BINARY_DIR}/phasekv-config.cmake"
    INSTALL_DESTINATION "${package_dir}"
)
write_basic_package_version_file(
    "${PROJECT_BINARY_DIR}/phasekv-config-version.cmake"
    COMPATIBILITY SameMinorVersion
)
install(
    FILES
        "${PROJECT_BINARY_DIR}/phasekv-config.cmake"
        "${PROJECT_BINARY_DIR}/phasekv-config-version.cmake"
    DESTINATION "${package_dir}"
    COMPONENT cpp
)
