package platform

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"helm.sh/helm/v3/pkg/chartutil"
)

// stage plays the root of one image: the files that the tree puts into it, at their paths, below dir.
type stage struct {
	image Image
	dir   string // absolute
}

// stageImages copies the files of every image of the profile to scratch/images/<n> and makes its scripts run there. An
// image of which the tree has nothing is skipped: old and new share a profile.
func stageImages(tree, scratch string, p *Profile) (map[string]*stage, error) {
	staged := map[string]*stage{}
	for i, image := range p.Images {
		s := &stage{image: image, dir: filepath.Join(scratch, "images", strconv.Itoa(i))}
		if len(image.Files) == 0 || !slices.ContainsFunc(image.Files, func(f ImageFile) bool { return exists(filepath.Join(tree, f.From)) }) {
			continue
		}
		if !plainPath.MatchString(s.dir) {
			return nil, fmt.Errorf("scripts can't be staged in %q, for shell scripts name it unquoted: choose an artifacts folder of letters, digits and ._-", s.dir)
		}
		if err := os.RemoveAll(s.dir); err != nil {
			return nil, err
		}
		for _, f := range image.Files {
			if err := s.copy(tree, f); err != nil {
				return nil, fmt.Errorf("image %s: %w", image.Image, err)
			}
		}
		staged[image.Image] = s
	}
	return staged, nil
}

var plainPath = regexp.MustCompile(`^[A-Za-z0-9_./+:@-]+$`)

func (s *stage) copy(tree string, f ImageFile) error {
	content, err := readPath(tree, filepath.Join(tree, filepath.FromSlash(f.From)))
	if err != nil {
		return err
	}
	for name, c := range content {
		target := filepath.Join(s.dir, filepath.FromSlash(f.At), filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(target, s.relocate(c.data), 0o700); err != nil {
			return err
		}
	}
	return nil
}

// relocate rewrites a script that was written for its place in the image: an absolute path such as /migrations, which
// the host does not have and must not get, becomes the copy's, and #!/bin/sh the program that plays the image's sh: on
// Alpine that is busybox, which knows pipefail, while many a host's sh is dash, which does not.
func (s *stage) relocate(data []byte) []byte {
	if bytes.IndexByte(data, 0) >= 0 {
		return data
	}
	if s.image.Shell != "" {
		data = binSh.ReplaceAllLiteral(data, []byte("#!/usr/bin/env "+s.image.Shell))
	}
	for _, f := range s.image.Files {
		at := regexp.MustCompile(`(^|[^A-Za-z0-9_.\-/}])` + regexp.QuoteMeta(f.At) + `($|[^A-Za-z0-9_.\-])`)
		lines := bytes.SplitAfter(data, []byte("\n"))
		for i, line := range lines {
			lines[i] = at.ReplaceAllFunc(line, func(m []byte) []byte {
				return bytes.Replace(m, []byte(f.At), []byte(filepath.Join(s.dir, f.At)), 1)
			})
		}
		data = bytes.Join(lines, nil)
	}
	return data
}

var binSh = regexp.MustCompile(`^#!\s*/bin/sh\b`)

// Entrypoint says how a container of an image runs on the host when the pod gives no command. ok is false for an image
// that the profile does not know or lists without files (the host then can only run the pod's own command), and for
// another version's: an image with files of this tree is known by the reference that the platform chart gives it.
func (v *Version) Entrypoint(image string) (path string, args []string, ok bool) {
	for _, i := range v.Profile.Images {
		s := v.staged[i.Image]
		if s == nil || image != v.MigrationImage || !glob(i.Image, image) {
			continue
		}
		script := s.script()
		program, args := interpreter(script)
		return program, append(append(args, script), i.Entrypoint[1:]...), true
	}
	return "", nil, false
}

// Entrypoints asks the versions in turn. The newest goes first: between releases, old and new of a real checkout name
// their migration images alike.
func Entrypoints(versions ...*Version) func(image string) (path string, args []string, ok bool) {
	return func(image string) (string, []string, bool) {
		for _, v := range versions {
			if path, args, ok := v.Entrypoint(image); ok {
				return path, args, ok
			}
		}
		return "", nil, false
	}
}

func (s *stage) script() string {
	return filepath.Join(s.dir, filepath.FromSlash(s.image.Entrypoint[0]))
}

// interpreter reads the script's #! line; without one it is bash's. `env` is resolved here, so that the process list
// shows the program.
func interpreter(script string) (program string, args []string) {
	data, _ := os.ReadFile(script)
	line, _, _ := strings.Cut(string(data), "\n")
	words := strings.Fields(strings.TrimPrefix(line, "#!"))
	if !strings.HasPrefix(line, "#!") || len(words) == 0 {
		words = []string{"bash"}
	}
	if path.Base(words[0]) == "env" && len(words) > 1 {
		words = words[1:]
	}
	if found, err := exec.LookPath(words[0]); err == nil {
		return found, words[1:]
	}
	return words[0], words[1:]
}

// migrationValues reads targetVersion and image.
func migrationValues(values chartutil.Values) (target int, image string, err error) {
	m, err := values.Table("migrations")
	if err != nil {
		return 0, "", fmt.Errorf("values.yaml has no migrations")
	}
	switch n := m["targetVersion"].(type) {
	case float64:
		target = int(n)
	case int64:
		target = int(n)
	case int:
		target = n
	case string:
		if target, err = strconv.Atoi(n); err != nil {
			return 0, "", fmt.Errorf("values.migrations.targetVersion is %q, no number", n)
		}
	default:
		return 0, "", fmt.Errorf("values.migrations.targetVersion is missing")
	}
	image, _ = m["image"].(string)
	return target, image, nil
}

// CheckUpgrade looks, before anything is started, for what makes an upgrade from old to new impossible on this machine:
// a target below the old one, a migration image that the profile can't run, a program that a needed migration
// (old.Target … new.Target-1) calls and neither the programs directory nor PATH has.
func CheckUpgrade(old, new *Version, programs string) error {
	if new.Target < old.Target {
		return fmt.Errorf("platform %q has migration target %d, below %d of %q: this is no upgrade", new.Spec, new.Target, old.Target, old.Spec)
	}
	if new.Target == old.Target {
		return nil
	}
	if _, _, ok := new.Entrypoint(new.MigrationImage); !ok {
		return fmt.Errorf("platform %q: profile %s has no staged image for values.migrations.image %q", new.Spec, new.Profile.Name, new.MigrationImage)
	}
	var missing []string
	for _, program := range new.Programs(old.Target) {
		if _, err := exec.LookPath(filepath.Join(programs, program)); programs != "" && err == nil {
			continue
		}
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, program)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("platform %q: migrations %d to %d call %s, which this machine lacks: install it, or put it into %s",
			new.Spec, old.Target, new.Target-1, strings.Join(missing, ", "), programs)
	}
	return nil
}

// Programs lists the programs that the migrations from…Target-1, their driver and the libraries they source call,
// sorted, as far as a scan for known names in command position tells.
func (v *Version) Programs(from int) []string {
	found := map[string]bool{}
	for _, s := range v.staged {
		queue := []string{s.script()}
		var libs []string
		for _, f := range s.image.Files {
			home := filepath.Join(s.dir, filepath.FromSlash(f.At))
			for n := from; n < v.Target; n++ {
				queue = append(queue, filepath.Join(home, strconv.Itoa(n)))
			}
			more, _ := filepath.Glob(filepath.Join(home, "*", "*"))
			libs = append(libs, more...)
		}
		for seen := map[string]bool{}; len(queue) > 0; queue = queue[1:] {
			name := queue[0]
			data, err := os.ReadFile(name)
			if err != nil || seen[name] {
				continue // a missing migration is for the driver to refuse
			}
			seen[name] = true
			program, _ := interpreter(name)
			found[filepath.Base(program)] = true
			for _, word := range commands(string(data)) {
				found[word] = true
			}
			for _, lib := range libs {
				if strings.Contains(string(data), filepath.Base(lib)) {
					queue = append(queue, lib)
				}
			}
		}
		for _, program := range s.image.Programs {
			found[program] = true
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// known are the programs beyond a POSIX base that migrations use. Any word in command position would be too many (a
// here-document is full of them) and a wrong "missing" stops a run that works.
const known = `kubectl|jq|yq|helm|curl|wget|openssl|git|flux|cozyhr|etcd-migrate|etcdctl|talosctl|virtctl|psql|velero|mc|python3|perl|gawk|xxd|uuidgen|envsubst`

var (
	comment      = regexp.MustCompile(`(^|\s)#.*`)
	quoted       = regexp.MustCompile("'[^'\n]*'|\"[^\"$`\n]*\"")
	inCommandPos = regexp.MustCompile("(?m)(?:^|[|;&(`!{]|\\b(?:if|then|else|elif|do|while|until|exec|time|xargs|command|timeout)\\s)\\s*(?:[A-Za-z_]\\w*=\\S*\\s+)*(" + known + ")(?:[\\s)]|$)")
)

func commands(script string) []string {
	lines := strings.Split(strings.ReplaceAll(script, "\\\n", " "), "\n")
	for i := range lines {
		lines[i] = quoted.ReplaceAllString(comment.ReplaceAllString(lines[i], ""), "_")
	}
	var words []string
	for _, m := range inCommandPos.FindAllStringSubmatch(strings.Join(lines, "\n"), -1) {
		words = append(words, m[1])
	}
	return words
}
