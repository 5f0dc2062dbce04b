#!/usr/bin/env bash
# Download, verify and unpack a data set:
#
#   scripts/download.sh coco /data/coco
#   scripts/download.sh voc2007 /data/voc
#   scripts/download.sh voc2012 /data/voc
#
# The same command resumes an interrupted download. The addresses, sizes and md5 are those of
# DATASETS.md, and MIRROR=https://thor.robots.ox.ac.uk replaces the host of the addresses. An
# archive is removed once it is unpacked.
#
# Other data sets are given on request. The script checks the files that you have placed there:
#
#   scripts/download.sh imagenet /data/imagenet
#   scripts/download.sh nuswide /data/nus_wide
set -euo pipefail

usage="coco|voc2007|voc2012|imagenet|nuswide FOLDER"
table="$(dirname "$0")/../DATASETS.md"

fail() {
    echo "download.sh: $1" >&2
    exit 1
}

# Print the rows "address bytes md5" whose address contains the text $1.
addresses() {
    sed -En "s#^\| (http[^ ]*$1[^ ]*) \| ([0-9,]+) \| ([0-9a-f]{32}) \|\$#\1 \2 \3#p" "$table" |
        tr -d ,
}

verify_md5() {
    echo "$2  $1" | md5sum --check --status ||
        fail "$1: its md5 is not $2; delete it and run the command again"
}

# Download, verify and unpack an archive: address, bytes, md5.
fetch() {
    local url=$1 bytes=$2 md5=$3 size=0
    local file="$folder/${url##*/}"
    if grep -qs "$md5" "$folder/.unpacked"; then
        echo "${file##*/}: unpacked before"
        return
    fi
    [ -z "${MIRROR:-}" ] || url="${MIRROR%/}/${url#*://*/}"

    # curl fails if it resumes a complete file.
    [ ! -e "$file" ] || size=$(wc -c <"$file")
    if ((size < bytes)); then
        echo "$url: $bytes bytes, $size of them are here"
        curl --fail --location --retry 5 --continue-at - --output "$file" "$url" ||
            fail "$url: not downloaded; run the command again, or pass MIRROR=https://HOST"
        size=$(wc -c <"$file")
    fi
    ((size == bytes)) ||
        fail "$file: $size bytes instead of $bytes; delete it and run the command again"
    verify_md5 "$file" "$md5"

    case "$file" in
        *.zip) python -m zipfile -e "$file" "$folder" ;;
        *) tar -xf "$file" -C "$folder" ;;
    esac
    echo "$md5 ${file##*/}" >>"$folder/.unpacked"
    rm "$file"
}

# Check that files exist in the folder: the place to ask for them, then the names.
require() {
    local where=$1 missing=() name
    shift
    for name; do
        [ -e "$folder/$name" ] || missing+=("$name")
    done
    [ ${#missing[@]} -eq 0 ] ||
        fail "$folder: missing ${missing[*]}; ask for them at $where, and see DATASETS.md"
}

[ $# -eq 2 ] || fail "expected $usage"
folder=$2
case "$1" in
    coco | voc2007 | voc2012)
        pattern="/$1/"
        [ "$1" != coco ] || pattern=images.cocodataset.org/
        rows=$(addresses "$pattern")
        [ -n "$rows" ] || fail "$table: no addresses of $1; restore the file"
        mkdir -p "$folder"
        while read -r url bytes md5; do
            fetch "$url" "$bytes" "$md5"
        done <<<"$rows"
        data=$1
        ;;
    imagenet)
        if [ ! -d "$folder/train" ] || [ ! -d "$folder/val" ]; then
            rows=$(sed -En 's#^\| (ILSVRC2012[^ ]*).* \| ([0-9a-f]{32}) \|$#\1 \2#p' "$table")
            # shellcheck disable=SC2046
            require "https://image-net.org (login)" $(cut -d " " -f 1 <<<"$rows")
            while read -r name md5; do
                verify_md5 "$folder/$name" "$md5"
            done <<<"$rows"
            script=$(realpath "$(dirname "$0")/unpack_imagenet.sh")
            echo "all archives are complete; unpack them: cd $folder && bash $script"
            exit
        fi
        data=imagenet
        ;;
    nuswide)
        require "https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html" \
            data.csv benchmark_81_v0.json wordvec_array.pth images
        data=nuswide_zsl
        ;;
    *) fail "$1: unknown data set; expected $usage" ;;
esac
echo "next: mldec check-data data=$data data.root=$folder"
